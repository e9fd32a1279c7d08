"""
The command `tft`, which is a group of subcommands, and the exit code of a refused subcommand.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

import click

from tft.errors import CheckpointCorrupt, StoryCorrupt, UsageError

_REFUSED = 2
_INTERRUPTED = 130

_APART = {
    "report": "report",
    "replay": "replay",
    "replicas": "replicas",
    "checkpoint": "checkpoints",
    "verify": "verify",
    "status": "status",
    "top": "top",
    "dashboard": "dashboard",
    "jobs": "jobs",
    "doctor": "doctor",
    "plugins": "plugins",
}
"""The commands that have a module of their own: maps the name of each command to the name of its
module in `tft.cli`. All other commands are in `tft.cli.commands`."""


class _Commands(click.Group):
    """
    The group of commands. It creates the object of a command only when the command is requested.
    One reason is that creating `tft run` loads all plugins, because plugins add options to it.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        jobs, looks, parts = (
            ["run", "verify", "pause", "resume", "dump"],
            ["status", "top", "dashboard", "jobs", "report", "doctor", "plugins"],
            ["lead", "broker", "controller", "agent"],
        )
        return [*jobs, *looks, *parts, "keys", "replay", "replicas", "checkpoint"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        # Import only the module of the requested command. A job starts many processes of `tft`, and
        # each of them starts faster without the modules of other commands.
        module = import_module(f"tft.cli.{_APART.get(cmd_name, 'commands')}")
        make: Callable[[], click.Command] = getattr(module, f"{cmd_name}_command")
        return make()


tft = _Commands(
    "tft", help="Run a distributed training job that survives the loss of its processes."
)


def main() -> None:
    """
    Run the command line and exit. This is the entry point of `tft` and of `python -m tft`.

    A command that is refused prints the reason and exits with code 2. So does a command whose
    output cannot be written. If the program that reads the output has ended, as `head` does after
    some lines, no reason is printed.
    """
    _import_structlog()
    try:
        code = tft.main(prog_name="tft", standalone_mode=False)
    except click.Abort:
        sys.exit(_INTERRUPTED)
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)
    except (UsageError, CheckpointCorrupt, StoryCorrupt) as refused:
        _say(str(refused))
        sys.exit(_REFUSED)
    except OSError as error:
        if not _is_of_output(error):
            raise
        _drop_output()
        _say(f"the output cannot be written: {error.strerror}")
        sys.exit(_REFUSED)
    sys.exit(code)


def _import_structlog() -> None:
    """
    Import structlog without rich. structlog would import rich, if it is installed, for a renderer
    that tft does not use. Without rich, each process of a job needs 0.05 s less processor time to
    start.

    A rank does not call this function, because a script may use that renderer.
    """
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # as Python marks an absent module
        try:
            import_module("structlog")
        finally:
            del sys.modules["rich"]


def _say(sentence: str) -> None:
    with suppress(OSError):  # stderr may be a file on a full disk too
        click.echo(f"tft: {sentence}", err=True)


def _is_of_output(error: OSError) -> bool:
    """
    Return whether a command has failed because its output could not be written: `click.echo` has
    raised the error.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _drop_output() -> None:
    """
    Drop the rest of the output, because Python would try to write it again when the process ends.
    """
    with suppress(OSError):  # stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
