"""
`tft plugins`: lists the adaptors, plugins and other extensions that are installed, and says which
of them cannot be used, and why.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict

import click

from tft import plugins
from tft.plugins import Extension
from tft.spi.adaptor import NEEDED_HOOKS

_WIDTH = 80
_BROKEN = 1
_TITLES = {
    plugins.ADAPTORS: "adaptors",
    plugins.PLUGINS: "plugins",
    plugins.PRELOADED: "modules that are imported before a rank is forked",
    plugins.CHECKPOINT_COMMANDS: "commands of tft checkpoint",
    plugins.JOB_FILES: "readers of job files, for tft replicas",
    plugins.LOGGERS: "loggers, for tft run --log",
}
_MEANS = {
    plugins.ADAPTORS: "a job cannot use this adaptor",
    plugins.PLUGINS: "jobs run without this plugin, or are refused",
}


def plugins_command() -> click.Command:
    """
    Return the command `tft plugins`.
    """

    def listing(as_json: bool) -> int:
        found = surveyed()
        if as_json:
            click.echo(json.dumps([asdict(each) for each in found], indent=1))
        else:
            click.echo("\n".join(_lines(found)))
        # do not count adaptors: that an adaptor cannot be imported because its framework is not
        # installed is no fault
        broken = any(each.problem for each in found if each.group != plugins.ADAPTORS)
        return _BROKEN if broken else 0

    return click.Command(
        "plugins",
        callback=listing,
        params=[click.Option(["--json", "as_json"], is_flag=True, help="Print the list as JSON.")],
        help="List adaptors, plugins and other extensions, and what cannot be used.\n\nExits with "
        "1 if an extension other than an adaptor cannot be used.",
    )


def surveyed() -> list[Extension]:
    """
    Return all extensions. What frameworks print when they are imported goes to standard error.
    """
    with redirect_stdout(sys.stderr):
        return plugins.extensions()


def _lines(found: Sequence[Extension]) -> Iterator[str]:
    for group, title in _TITLES.items():
        yield f"{title} ({group})"
        those = [each for each in found if each.group == group]
        if not those:
            yield "  none"
        for each in those:
            package = f"{each.package} {each.version}".strip() or "an unknown package"
            yield f"  {each.name}: {each.value}, of {package}"
            for name, value in _facts(each):
                yield from textwrap.wrap(
                    f"{name}: {value}",
                    _WIDTH,
                    initial_indent="    ",
                    subsequent_indent="      ",
                    break_on_hyphens=False,
                )
        yield ""


def _facts(each: Extension) -> Iterator[tuple[str, str]]:
    if each.problem:
        yield "CANNOT BE USED", " ".join(each.problem.split())
        if each.group in _MEANS:
            yield "so", _MEANS[each.group]
    needed = [hook for hook in NEEDED_HOOKS if hook in each.hooks]
    if each.group == plugins.ADAPTORS and each.hooks:
        yield "required hooks", f"{len(needed)} of {len(NEEDED_HOOKS)}"
        more = [hook for hook in each.hooks if hook not in NEEDED_HOOKS]
        yield "optional hooks", ", ".join(more) or "none"
    elif each.hooks:
        yield "hooks", ", ".join(each.hooks)
    if each.options:
        yield "options of tft run", ", ".join(each.options)
