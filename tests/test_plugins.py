"""
Adaptors and plugins: which ones are found, which are refused, and how their failures are handled.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pluggy
import pytest
from structlog.testing import capture_logs

from tests.agent.stage import package
from tft.errors import UnknownAdaptor, UsageError
from tft.plugins import (
    add,
    call_guarded,
    check_complete,
    direct,
    load_adaptor,
    load_plugins,
)
from tft.spi import AdaptorSpecs, PluginSpecs, hookimpl
from tft.spi.adaptor import NEEDED_HOOKS

Install = Callable[[str, str, str], None]

HOOK = "from tft.spi import hookimpl\n@hookimpl\n"
STRATEGIES = HOOK + "def tft_strategies(): return ['dump']\n"
ENVIRONMENT = HOOK + "def tft_environment(options): return {__name__: options['x']}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """
    Return a function that installs a package: a module and an entry point.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def installed(name: str, source: str, group: str) -> None:
        package(tmp_path, name, source, group)
        names.append(name)

    yield installed
    for name in names:
        sys.modules.pop(name, None)
    load_adaptor.cache_clear()


# ---------------------------------------------------------------- adaptors


def test_only_the_named_adaptor_is_loaded(install: Install) -> None:
    """When several adaptors are installed, then only the named one is imported, once."""
    install("stranger_a", STRATEGIES, "tft.adaptors")
    install("stranger_b", "raise SystemExit('must not be imported')", "tft.adaptors")
    adaptor = load_adaptor("stranger_a")

    assert adaptor.hook.tft_strategies() == ["dump"]
    assert load_adaptor("stranger_a") is adaptor


def test_unknown_adaptor_is_refused_with_the_list_of_installed_ones(install: Install) -> None:
    """When no package offers the adaptor, then the message lists the installed adaptors."""
    install("stranger_a", STRATEGIES, "tft.adaptors")
    with pytest.raises(UnknownAdaptor, match=r"adaptor named 'torhc'; installed: .*stranger_a"):
        load_adaptor("torhc")


def test_an_adaptor_without_its_framework_is_refused_with_the_reason(install: Install) -> None:
    """When the framework cannot be imported, then the message names the missing module."""
    install("stranger_a", "import a_framework", "tft.adaptors")
    with pytest.raises(
        UnknownAdaptor, match=r"'stranger_a' cannot be imported: .*No module named 'a_framework'"
    ):
        load_adaptor("stranger_a")


def test_an_adaptor_without_any_hook_is_refused(install: Install) -> None:
    """When the object of the entry point has no hook, then it is refused. An example is a module
    whose hooks have moved into an object."""
    install("stranger_a", "", "tft.adaptors")
    with pytest.raises(UnknownAdaptor, match=r"'stranger_a' has no hooks: reinstall"):
        load_adaptor("stranger_a")


@pytest.mark.parametrize(
    ("implemented", "missing"),
    [
        (NEEDED_HOOKS, ()),
        ([hook for hook in NEEDED_HOOKS if hook != "tft_rollback"], ["tft_rollback"]),
        ([*NEEDED_HOOKS, "tft_backup"], ["tft_backups", "tft_restore"]),
    ],
)
def test_an_adaptor_that_lacks_a_needed_hook_is_refused(
    implemented: Sequence[str], missing: Sequence[str], install: Install
) -> None:
    """When an adaptor does not implement a needed hook, then it is refused, and the message names
    the hook."""
    source = "".join(f"@hookimpl\ndef {hook}(): pass\n" for hook in implemented)
    install("stranger_n", f"from tft.spi import hookimpl\n{source}", "tft.adaptors")
    adaptor = load_adaptor("stranger_n")
    if not missing:
        check_complete(adaptor, "stranger_n")
        return
    with pytest.raises(UsageError, match=f"must have: {', '.join(missing)}; implement"):
        check_complete(adaptor, "stranger_n")


def test_adaptor_for_tests_has_all_needed_hooks() -> None:
    """When the adaptor for tests is loaded, then it has all needed hooks."""
    check_complete(load_adaptor("fake"), "fake")


def test_unknown_hook_is_refused_by_name(install: Install) -> None:
    """When an adaptor or a plugin implements an unknown hook, then it is refused, because the hook
    would never be called."""
    misspelt = HOOK + "def tft_quiese(): pass\n"
    install("stranger_a", misspelt, "tft.adaptors")
    with pytest.raises(UsageError, match=r"'stranger_a' does not fit .*'tft_quiese'"):
        load_adaptor("stranger_a")
    install("stranger_p", misspelt, "tft.plugins")
    with pytest.raises(UsageError, match=r"'stranger_p' does not fit .*'tft_quiese'"):
        load_plugins()


def test_unknown_hook_argument_is_refused(install: Install) -> None:
    """When a hook implementation asks for an argument that the hook does not have, then the message
    names the argument."""
    install("stranger_a", HOOK + "def tft_rollback(privat): pass\n", "tft.adaptors")
    with pytest.raises(UsageError, match=r"tft_rollback.*privat"):
        load_adaptor("stranger_a")


def test_hook_wrapper_is_refused(install: Install) -> None:
    """When a plugin wraps a hook, then it is refused, because plugins are called one by one."""
    wrapper = "from tft.spi import hookimpl\n@hookimpl(wrapper=True)\ndef tft_options(): yield\n"
    install("stranger_p", wrapper, "tft.plugins")
    with pytest.raises(UsageError, match="for the hook tft_options is a wrapper"):
        load_plugins()


def test_adaptor_name_offered_by_two_packages_is_refused(install: Install, tmp_path: Path) -> None:
    """When two packages offer adaptors of the same name, then the name is refused, and the message
    names both packages."""
    install("stranger_a", STRATEGIES, "tft.adaptors")
    install("stranger_b", STRATEGIES, "tft.adaptors")
    entry = tmp_path / "stranger_b-1.0.dist-info" / "entry_points.txt"
    entry.write_text("[tft.adaptors]\nstranger_a = stranger_b\n")

    with pytest.raises(
        UsageError, match=r"several packages provide .*stranger_a.* and .*stranger_b"
    ):
        load_adaptor("stranger_a")


# ---------------------------------------------------------------- plugins


def test_a_plugin_that_cannot_be_imported_is_left_out(install: Install) -> None:
    """When one plugin cannot be imported, then this is logged, and the other plugins are loaded."""
    install("stranger_p", "1 / 0", "tft.plugins")
    install("stranger_q", ENVIRONMENT, "tft.plugins")
    with capture_logs() as logs:
        plugins = load_plugins()

    assert [(line["event"], line["plugin"]) for line in logs] == [
        ("plugin_not_loaded", "stranger_p")
    ]
    assert plugins.has_plugin("stranger_q")


class Options:
    """
    A plugin that answers two hooks with the object it was made with, or raises that object.
    """

    def __init__(self, answer: str | BaseException | None) -> None:
        self._answer = answer

    @hookimpl
    def tft_environment(self, options: Mapping[str, str]) -> Mapping[str, str] | None:
        answer = self._given()
        return None if answer is None else {answer: options["x"]}

    @hookimpl
    def tft_fault_moment(self, kind: str) -> str | None:
        return self._given()

    def _given(self) -> str | None:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


def plugins_of(*answers: str | BaseException | None) -> pluggy.PluginManager:
    """
    Return a plugin manager with plugins that give these answers. The last plugin is called first.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    for number, answer in enumerate(answers):
        add(manager, Options(answer), f"plugin {number}")
    return manager


def test_a_plugin_that_raises_is_logged_and_the_others_are_called() -> None:
    """When one of several plugins raises an error, then the error is logged, and the other answers
    are returned without the Nones."""
    plugins = plugins_of("a", RuntimeError("sorry"), None, "b")
    with capture_logs() as logs:
        answers = call_guarded(plugins, "tft_environment", options={"x": "1"})

    assert answers == [{"b": "1"}, {"a": "1"}]
    [line] = logs
    assert (line["event"], line["plugin"], line["hook"]) == (
        "plugin_failed",
        "plugin 1",
        "tft_environment",
    )
    assert line["exc_info"]


def test_a_plugin_that_calls_exit_is_logged_and_the_others_are_called(install: Install) -> None:
    """When a plugin calls `sys.exit` at its import or in a hook, then this is logged as a failure
    of the plugin. The process of tft continues."""
    install("stranger_r", "import sys; sys.exit(3)", "tft.plugins")
    with capture_logs() as logs:
        assert not load_plugins().has_plugin("stranger_r")
        answers = call_guarded(
            plugins_of("a", SystemExit(3)), "tft_environment", options={"x": "1"}
        )

    assert answers == [{"a": "1"}]
    assert [(line["event"], line["plugin"]) for line in logs] == [
        ("plugin_not_loaded", "stranger_r"),
        ("plugin_failed", "plugin 1"),
    ]


def test_usage_error_of_a_plugin_is_raised_only_when_the_caller_allows_it() -> None:
    """When a plugin raises a `UsageError`, then it is raised to the caller if `may_refuse` is set.
    Otherwise it is logged as a failure."""
    plugins = plugins_of(UsageError("not like this"), "a")
    with pytest.raises(UsageError, match="not like this"):
        call_guarded(plugins, "tft_environment", may_refuse=True, options={"x": "1"})
    with capture_logs():
        assert call_guarded(plugins, "tft_environment", options={"x": "1"}) == [{"a": "1"}]
    plugins = plugins_of(ValueError("a bug of the plugin"), "a")
    with capture_logs():
        answers = call_guarded(plugins, "tft_environment", may_refuse=True, options={"x": "1"})
    assert answers == [{"a": "1"}]


def test_hook_with_one_answer_stops_at_the_first_answer() -> None:
    """When a hook wants one answer, then the plugins after the first that answers are not called."""
    plugins = plugins_of(RuntimeError("not reached"), "known", None)
    answers = call_guarded(
        plugins, "tft_fault_moment", run_dir=Path(), kind="process", rank=1, seen=2.0
    )
    assert answers == ["known"]


class Full:
    """
    An adaptor whose hook has all arguments.
    """

    @hookimpl
    def tft_capture(self, closing: bool) -> bytes:
        """
        Return the argument.
        """
        return b"closing" if closing else b"open"


class Short:
    """
    An adaptor whose hook leaves an argument out.
    """

    @hookimpl
    def tft_capture(self) -> bytes:
        """
        Return a constant.
        """
        return b"same"


@pytest.mark.parametrize(
    ("adaptor", "plain", "told"), [(Full(), True, b"closing"), (Short(), False, b"same")]
)
def test_hook_of_every_step_is_called_directly(adaptor: object, plain: bool, told: bytes) -> None:
    """When an adaptor takes all arguments of a hook, then its function is called directly. If the
    function leaves an argument out, it is called through the hook. The result is the same."""
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(AdaptorSpecs)
    add(manager, adaptor, "one")
    called = direct(manager.hook.tft_capture)
    assert (called is not manager.hook.tft_capture) is plain
    assert called(closing=True) == manager.hook.tft_capture(closing=True) == told
