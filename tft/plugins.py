"""
Adaptors and plugins: how they are found among the installed packages, and how they are called.

An adaptor is needed: whatever is wrong with it is refused with a sentence. A plugin is not: one
that cannot be imported is left out, one that raises is logged, and the job goes on. Both are
refused when they implement a hook that does not exist: it would silently never be called.
"""

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

import pluggy
import structlog

from tft.errors import UnknownAdaptor, UsageError
from tft.hooks import AdaptorSpecs, PluginSpecs

ADAPTORS = "tft.adaptors"
"""The entry point group an adaptor package registers in."""
PLUGINS = "tft.plugins"
"""The entry point group a plugin package registers in."""

log = structlog.get_logger(__name__)


@functools.cache  # the launcher of a rank loads it before the script, `tft.init` asks again
def load_adaptor(name: str) -> pluggy.PluginManager:
    """
    The adaptor of that name, alone; call it through `.hook`. The same one in the whole process.

    Raises `UnknownAdaptor` where no package offers it, its import fails or it has no hook, `UsageError` where it
    does not fit the hook specifications.
    """
    entry = find_adaptor(name)
    try:
        adaptor = entry.load()
    except Exception as error:
        raise UnknownAdaptor(
            f"the adaptor {name!r} is installed, but {entry.value!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(AdaptorSpecs)
    add(manager, adaptor, name)
    if not manager.get_hookcallers(adaptor):
        raise UnknownAdaptor(
            f"the adaptor {name!r} is installed, but {entry.value!r} has no hook in it: install its package anew, or "
            "have its entry point name what has the hooks"
        )
    return manager


def find_adaptor(name: str) -> EntryPoint:
    """
    Where the adaptor of that name is, without importing it: that is slow, and the launcher of a
    job has no use for a framework.

    Raises `UnknownAdaptor` where no package offers it, `UsageError` where several do.
    """
    return _only(name, entry_points(group=ADAPTORS))


def load_plugins() -> pluggy.PluginManager:
    """
    All installed plugins that can be imported; those that cannot are logged.

    Raises `UsageError` for one that does not fit the hook specifications.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for name in sorted(entry_points(group=PLUGINS).names):
        try:
            plugin = _only(name, entry_points(group=PLUGINS)).load()
        except UsageError:
            raise
        except Exception:  # whatever the import of a stranger's module raises
            log.exception("plugin_not_loaded", plugin=name)
            continue
        add(manager, plugin, name)
    return manager


def add(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """
    Register one adaptor, plugin or object with hooks, and check it against the specifications.

    Raises `UsageError` naming a hook that is not known or asks for arguments it does not get.
    """
    try:
        manager.register(plugin, name)
        manager.check_pending()
        for caller in manager.get_hookcallers(plugin) or ():
            if any(hook.wrapper or hook.hookwrapper for hook in caller.get_hookimpls()):
                raise ValueError(f"it wraps {caller.name}, and tft calls plugins one by one")
    except (pluggy.PluginValidationError, ValueError) as error:
        what = " ".join(str(error).split())
        raise UsageError(
            f"{name!r} does not fit the hooks of this version of tft: {what}"
        ) from None


def call_guarded(
    manager: pluggy.PluginManager,
    hook: str,
    *,
    may_refuse: bool = False,
    **arguments: Any,  # Any: each hook's own
) -> list[Any]:  # Any: each hook's own
    """
    Call one hook on every plugin, one by one; what they answered, without the Nones.

    A plugin that raises is logged and the next one is called; with `may_refuse` a `UsageError`
    is let through. A hook of which only the first answer counts ends with the first one.
    """
    caller = getattr(manager.hook, hook)
    first_only = bool(caller.spec and caller.spec.opts["firstresult"])
    answers: list[Any] = []  # Any: each hook's own
    for implementation in reversed(caller.get_hookimpls()):  # pluggy's order: last in, first out
        try:
            # not through pluggy's own call: there the first one to raise ends it for all
            answer = implementation.function(*(arguments[n] for n in implementation.argnames))
        except Exception as error:  # whatever a stranger's code raises
            if may_refuse and isinstance(error, UsageError):
                raise
            log.exception("plugin_failed", plugin=implementation.plugin_name, hook=hook)
            continue
        if answer is not None:
            answers.append(answer)
            if first_only:
                break
    return answers


def _only(name: str, found: EntryPoints) -> EntryPoint:
    """
    The one entry point of that name.
    """
    offers = {entry.value: entry for entry in found if entry.name == name}
    match sorted(offers.values(), key=lambda entry: entry.value):
        case [entry]:
            return entry
        case []:
            names = ", ".join(sorted({entry.name for entry in found})) or "none"
            raise UnknownAdaptor(
                f"no installed package offers an adaptor named {name!r}; found: {names}"
            )
        case several:
            packages = " and ".join(
                f"{entry.value} (of {entry.dist.name if entry.dist else 'an unknown package'})"
                for entry in several
            )
            raise UsageError(f"{name!r} is offered more than once: {packages}; uninstall one")


def quick(caller: pluggy.HookCaller) -> Callable[..., Any]:  # Any: the hook's own
    """
    Return what a hook of an adaptor is called by in every step: its one implementation itself where that takes all
    arguments, which is a third of the time, else the hook.
    """
    impls = caller.get_hookimpls()
    if len(impls) != 1 or impls[0].wrapper or impls[0].hookwrapper or caller.spec is None:
        return caller
    takes_all = tuple(impls[0].argnames) == tuple(caller.spec.argnames)
    function: Callable[..., Any] = impls[0].function
    return function if takes_all else caller
