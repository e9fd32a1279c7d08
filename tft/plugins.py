"""
Finds adaptors and plugins among the installed packages, and calls them.

A job does not start if its adaptor cannot be loaded, because it cannot train without the adaptor. A
job can train without plugins: a plugin that cannot be imported is left out. If a plugin raises an
exception, the exception is logged and the job goes on. tft refuses an adaptor or plugin that
implements a hook that tft does not have. Otherwise tft would never call that function, and nobody
would notice.
"""

import functools
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
import structlog

from tft.errors import UnknownAdaptor, UsageError
from tft.spi.adaptor import NEEDED_HOOKS, AdaptorSpecs
from tft.spi.plugin import PluginSpecs
from tft.spi.types import Parallelism

if TYPE_CHECKING:
    import click

ADAPTORS = "tft.adaptors"
"""The entry point group in which packages register adaptors."""
PLUGINS = "tft.plugins"
"""The entry point group in which packages register plugins."""
PRELOADED = "tft.preload"
"""The entry point group of modules that the fork server may import before it forks. Such a module
has no state that a rank must have for itself: at its import it reads no variable of a rank, draws
no random numbers, opens no files and starts no threads."""

CHECKPOINT_COMMANDS = "tft.checkpoint_commands"
"""The entry point group of functions that return a command of `tft checkpoint`."""
JOB_FILES = "tft.job_files"
"""The entry point group of functions that read the parallel sizes of a job from a configuration
file of a framework. The name of an entry point is the option of `tft replicas` that takes such a
file."""

LOGGERS = "tft.loggers"
"""The entry point group of functions that open a logger for `tft run --log` (the plugin
`tft_loggers`). The name of an entry point is the name of the logger."""

GROUPS = (ADAPTORS, PLUGINS, PRELOADED, CHECKPOINT_COMMANDS, JOB_FILES, LOGGERS)
"""All entry point groups of tft."""

FAILURES = (Exception, SystemExit)
"""The exceptions that count as a failure of a plugin. `SystemExit` is included because `sys.exit`
in a plugin must not end a process of tft."""

log = structlog.get_logger(__name__)


# the result is cached, because the process of a rank calls this function twice: before the script
# runs, and in `tft.init`
@functools.cache
def load_adaptor(name: str) -> pluggy.PluginManager:
    """
    Load the adaptor called `name`. Return a plugin manager that contains only this adaptor, and
    whose attribute `hook` calls the adaptor's hooks. Further calls with the same name return the
    same manager.

    Raises `UnknownAdaptor` when no package offers the adaptor, when its import fails, or when it
    has no hooks. Raises `UsageError` when several packages offer the adaptor, or when the adaptor
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
            f"the adaptor {name!r} is installed, but {entry.value!r} has no hooks: reinstall its "
            "package, or correct its entry point so that it names the object with the hooks"
        )
    return manager


def find_adaptor(name: str) -> EntryPoint:
    """
    Return the entry point of the adaptor called `name`.

    The adaptor is not imported: the launcher of a job calls this function, and does not need the
    framework, whose import is slow.

    Raises `UnknownAdaptor` when no package offers the adaptor. Raises `UsageError` when several
    packages offer the adaptor.
    """
    return _only(name, entry_points(group=ADAPTORS), "an adaptor")


def check_complete(adaptor: pluggy.PluginManager, name: str) -> None:
    """
    Check that an adaptor implements all required hooks. pluggy itself does not report a missing
    hook. Without `tft_rollback`, for example, a rank would continue with a wrong state, and nobody
    would notice. `name` is the name of the adaptor for the error message.

    Raises `UsageError`, which names the missing hooks.
    """
    needed = [*NEEDED_HOOKS]
    if adaptor.hook.tft_backup.get_hookimpls():
        needed += ["tft_backups", "tft_restore"]
    missing = [hook for hook in needed if not getattr(adaptor.hook, hook).get_hookimpls()]
    if missing:
        raise UsageError(
            f"the adaptor {name!r} lacks hooks that it must have: {', '.join(missing)}; implement "
            "these hooks in the adaptor"
        )


def direct(hook: pluggy.HookCaller) -> Callable[..., Any]:
    """
    Return the function that implements a hook, so that tft can call the function without pluggy.
    Use this function for hooks that are called several times in every step: pluggy needs a
    microsecond for each call.

    Return the hook itself if a direct call would not do the same as pluggy, for example because
    several functions implement the hook.
    """
    implementations = hook.get_hookimpls()
    if len(implementations) != 1 or hook.spec is None:
        return hook
    (only,) = implementations
    plain = not (only.wrapper or only.hookwrapper) and bool(hook.spec.opts.get("firstresult"))
    function: Callable[..., Any] = only.function
    return function if plain and set(only.argnames) == set(hook.spec.argnames) else hook


def load_plugins() -> pluggy.PluginManager:
    """
    Return a plugin manager with all installed plugins that can be imported. If a plugin cannot be
    imported, log its exception and leave the plugin out.

    Raises `UsageError` when a plugin does not fit the hook specifications, or when several packages
    offer a plugin with the same name.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    found = entry_points(group=PLUGINS)
    for name in sorted(found.names):
        entry = _only(name, found, "a plugin")
        try:
            plugin = entry.load()
        except FAILURES:  # importing a third-party module may raise any exception
            log.exception("plugin_not_loaded", plugin=name)
            continue
        add(manager, plugin, name)
    return manager


def preload_plugins() -> None:
    """
    Import the modules in the entry point group `PRELOADED`. The fork server calls this before it
    forks. Otherwise each new rank would import these modules itself, while the other ranks wait for
    it.
    """
    for entry in entry_points(group=PRELOADED):
        try:
            entry.load()
        except FAILURES:  # importing a third-party module may raise any exception
            log.exception("module_not_preloaded", module=entry.value)


def checkpoint_commands() -> list["click.Command"]:
    """
    Return the commands that installed packages add to `tft checkpoint`. If a command cannot be
    imported or made, log the exception and leave the command out.

    Raises `UsageError` when several packages offer a command with the same name.
    """
    commands = []
    for name in sorted(entry_points(group=CHECKPOINT_COMMANDS).names):
        entry = _only(name, entry_points(group=CHECKPOINT_COMMANDS), "a checkpoint command")
        try:
            commands.append(entry.load()())
        except FAILURES:  # importing a third-party module may raise any exception
            log.exception("checkpoint_command_not_loaded", command=name)
    return commands


def read_job_file(kind: str, file: Path) -> Parallelism:
    """
    Return the parallel sizes of a job from a configuration file of a framework. `kind` is the name
    of the entry point (in the group `JOB_FILES`) of the function that reads such files.

    Raises `UsageError` when no installed package reads such files, or when the file cannot be used.
    """
    entry = _only(kind, entry_points(group=JOB_FILES), "a reader of job files")
    reader: Callable[[Path], Parallelism] = entry.load()
    return reader(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """
    One installed extension of tft: its entry point, and the result of its import.
    """

    group: str
    """The entry point group, such as `tft.plugins`."""
    name: str
    value: str
    """The module, or the object in a module, that the entry point names."""
    package: str
    """The name of the package that provides the extension. Empty: the package is not known."""
    version: str
    problem: str = ""
    """Why the extension cannot be used. Empty: it can be used."""
    hooks: tuple[str, ...] = ()
    """The hooks that the extension implements, in alphabetical order."""
    missing: tuple[str, ...] = ()
    """For an adaptor: the required hooks that it does not implement."""
    options: tuple[str, ...] = ()
    """The options that the extension adds to `tft run`."""


def extensions(groups: Sequence[str] = GROUPS) -> list[Extension]:
    """
    Import all installed extensions of the entry point groups `groups`, and return one `Extension`
    for each. For an extension that cannot be used, the field `problem` has the reason.
    """
    return [
        _extension(group, entry)
        for group in groups
        for entry in sorted(set(entry_points(group=group)), key=lambda e: (e.name, e.value))
    ]


def _extension(group: str, entry: EntryPoint) -> Extension:
    found = Extension(
        group=group,
        name=entry.name,
        value=entry.value,
        package=entry.dist.name if entry.dist else "",
        version=entry.dist.version if entry.dist else "",
    )
    try:
        if group not in (ADAPTORS, PLUGINS):
            _only(entry.name, entry_points(group=group), "an extension")
            entry.load()
            return found
        manager = load_adaptor(entry.name) if group == ADAPTORS else _alone(entry)
    except UsageError as refused:
        return replace(found, problem=str(refused))
    except FAILURES as error:  # importing a third-party module may raise any exception
        return replace(found, problem=f"its import fails: {type(error).__name__}: {error}")
    hooks = {
        caller.name
        for plugin in manager.get_plugins()
        for caller in manager.get_hookcallers(plugin) or ()
    }
    missing, problem = tuple[str, ...](), ""
    if group == ADAPTORS:
        missing = tuple(hook for hook in NEEDED_HOOKS if hook not in hooks)
        try:
            check_complete(manager, entry.name)
        except UsageError as incomplete:
            problem = str(incomplete)
    answers = call_guarded(manager, "tft_options") if "tft_options" in hooks else []
    options = tuple(each.opts[0] for answer in answers for each in answer)
    return replace(
        found, problem=problem, hooks=tuple(sorted(hooks)), missing=missing, options=options
    )


def _alone(entry: EntryPoint) -> pluggy.PluginManager:
    """
    Return a plugin manager with only the plugin of an entry point.

    Raises `UsageError` if the plugin does not fit the hook specifications, or if several packages
    offer a plugin with this name. Raises whatever the import of the plugin raises.
    """
    _only(entry.name, entry_points(group=PLUGINS), "a plugin")
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, entry.load(), entry.name)
    return manager


def add(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """
    Register one adaptor, plugin or object with hooks, and check it against the hook specifications.

    Raises `UsageError` when a hook of the object does not exist in tft, has parameters that tft
    does not pass, or is a wrapper around other hooks. The message names the hook.
    """
    try:
        manager.register(plugin, name)
        manager.check_pending()
        for caller in manager.get_hookcallers(plugin) or ():
            if any(hook.wrapper or hook.hookwrapper for hook in caller.get_hookimpls()):
                raise ValueError(
                    f"its function for the hook {caller.name} is a wrapper around other functions, "
                    "and tft supports no wrappers of hooks"
                )
    except (pluggy.PluginValidationError, ValueError) as error:
        what = " ".join(str(error).split())
        raise UsageError(
            f"the adaptor, plugin or object {name!r} does not fit the hooks of this version of tft "
            f"(the functions that tft calls): {what}"
        ) from None


def call_guarded(
    manager: pluggy.PluginManager,
    hook: str,
    *,
    may_refuse: bool = False,
    **arguments: Any,  # Any: each hook has its own arguments
) -> list[Any]:  # Any: each hook has its own type of answer
    """
    Call one hook on every plugin, one by one. Return the answers that are not None.

    If a plugin raises an exception or calls `sys.exit`, the exception is logged and the next plugin
    is called. With `may_refuse`, a `UsageError` or `SystemExit` of a plugin is raised instead. If
    the hook has the option `firstresult`, no plugin is called after the first answer.
    """
    caller = getattr(manager.hook, hook)
    first_only = bool(caller.spec and caller.spec.opts["firstresult"])
    answers: list[Any] = []  # Any: each hook has its own type of answer
    # call the plugins in the reverse order of their registration, as pluggy does
    for implementation in reversed(caller.get_hookimpls()):
        try:
            # call the function of the plugin without pluggy: a call through pluggy would stop at
            # the first plugin that raises an exception
            answer = implementation.function(*(arguments[n] for n in implementation.argnames))
        except FAILURES as error:  # third-party code may raise any exception
            refuses = may_refuse and isinstance(error, UsageError | SystemExit)
            if refuses or is_exit_by_signal(error):
                raise
            _tell_failure(implementation.plugin_name, hook, error)
            continue
        if answer is not None:
            answers.append(answer)
            if first_only:
                break
    return answers


_failures: Counter[tuple[str, str, str]] = Counter()
"""How often a hook of a plugin has failed with the same kind of error in this process."""


def _tell_failure(plugin: str, hook: str, error: BaseException) -> None:
    """
    Log the failure of a plugin's hook. Some hooks are called many times a second, so only the 1st,
    2nd, 4th, 8th, … failure with the same kind of error is logged.
    """
    key = plugin, hook, type(error).__name__
    _failures[key] += 1
    times = _failures[key]
    if times & (times - 1) == 0:
        log.error("plugin_failed", plugin=plugin, hook=hook, times=times, exc_info=error)


def _only(name: str, found: EntryPoints, what: str) -> EntryPoint:
    """
    Return the only entry point called `name` among `found`, the entry points of a group. `what` is
    a noun for error messages that says what such an entry point provides, such as "a plugin".

    Raises `UnknownAdaptor` when no entry point has the name, and `UsageError` when several have it.
    """
    offers = {entry.value: entry for entry in found if entry.name == name}
    match sorted(offers.values(), key=lambda entry: entry.value):
        case [entry]:
            return entry
        case []:
            names = ", ".join(sorted({entry.name for entry in found})) or "none"
            raise UnknownAdaptor(
                f"no installed package provides {what} named {name!r}; installed: {names}"
            )
        case several:
            packages = " and ".join(
                f"{entry.value} (of {entry.dist.name if entry.dist else 'an unknown package'})"
                for entry in several
            )
            raise UsageError(
                f"several packages provide {what} named {name!r}: {packages}; uninstall all but one"
            )


def is_exit_by_signal(error: BaseException) -> bool:
    """
    Return True if `error` is a `SystemExit` that a signal handler of this program has raised while
    a plugin was running. The plugin has not failed then, and the program must end.
    """
    if not isinstance(error, SystemExit):
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
