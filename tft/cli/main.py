"""
`tft`: the commands, and how each of them ends when it is refused.
"""

import sys
from collections.abc import Callable
from importlib import import_module

import click

from tft.errors import CheckpointCorrupt, StoryCorrupt, UsageError

_REFUSED = 2
_INTERRUPTED = 130

_APART = {"replay": "replay", "replicas": "replicas", "checkpoint": "checkpoints"}
"""Commands that are not in `tft.cli.commands`, by their modules."""


class _Commands(click.Group):
    """
    Makes a command when it is asked for: only `tft run` needs the plugins' options.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        jobs, parts = ["run", "pause", "resume", "dump"], ["lead", "broker", "controller", "agent"]
        return [*jobs, *parts, "keys", "replay", "replicas", "checkpoint"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        # of the others each module is imported for its own command alone: a job starts many processes
        module = import_module(f"tft.cli.{_APART.get(cmd_name, 'commands')}")
        make: Callable[[], click.Command] = getattr(module, f"{cmd_name}_command")
        return make()


tft = _Commands(
    "tft", help="Runs a distributed training job that survives the loss of its processes."
)


def main() -> None:
    """
    What `tft` and `python -m tft` run. Exits 2, with a sentence, for what is refused.
    """
    try:
        code = tft.main(prog_name="tft", standalone_mode=False)
    except click.Abort:
        sys.exit(_INTERRUPTED)
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)
    except (UsageError, CheckpointCorrupt, StoryCorrupt) as refused:
        click.echo(f"tft: {refused}", err=True)
        sys.exit(_REFUSED)
    sys.exit(code)
