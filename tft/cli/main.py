"""
`tft`: the commands, and how each of them ends when it is refused.
"""

import sys

import click

from tft.errors import CheckpointCorrupt, StoryCorrupt, UsageError

_REFUSED = 2
_INTERRUPTED = 130


class _Commands(click.Group):
    """
    Makes a command when it is asked for: only `tft run` needs the plugins' options.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        jobs, parts = ["run", "pause", "resume", "dump"], ["lead", "broker", "controller", "agent"]
        return [*jobs, *parts, "keys", "replay", "replicas", "checkpoint"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from tft.cli import checkpoints, commands, replay, replicas

        make = {
            "run": commands.run_command,
            "lead": commands.lead_command,
            "pause": commands.pause_command,
            "resume": commands.resume_command,
            "dump": commands.dump_command,
            "broker": commands.broker_command,
            "controller": commands.controller_command,
            "agent": commands.agent_command,
            "keys": commands.keys_command,
            "replay": replay.replay_command,
            "replicas": replicas.replicas_command,
            "checkpoint": checkpoints.checkpoint_command,
        }.get(cmd_name)
        return make() if make else None


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
