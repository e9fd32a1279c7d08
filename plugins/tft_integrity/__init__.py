"""
Integrity: compares the copies that ranks hold of each shard, while the job trains. It is switched
on with `tft run --integrity N` (see `docs/howto/integrity.md`).

After each step every rank digests one slice of each of its shards. The controller compares the
digests of all ranks that hold the same shard. So every byte is compared at least once in N steps.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tft.errors import UsageError
from tft.spi import SessionView, hookimpl
from tft_integrity.digester import Digester

VARIABLE = "TFT_INTEGRITY"
"""The environment variable that carries N, the number given to `--integrity`, to every process of
the job."""
DEFAULT = 50
"""The value of N if `--integrity` is given without a number."""
ON_THE_WAY = 2
"""The smallest number of steps that are reserved for sending the digests to the controller. The
number of slices of a shard is N minus the reserved steps, so that the controller knows of a
difference within N steps. If steps are much shorter than the time between two heartbeats of an
agent, the controller may know of a difference some steps later."""
SHARE = 8
"""If N is 24 or more, the number of steps that are reserved for sending the digests is N divided by
this number, and not `ON_THE_WAY`. So more steps are reserved if N is large, because one heartbeat
may carry the digests of several short steps."""


@hookimpl
def tft_options() -> Sequence[click.Option]:
    return [
        click.Option(
            ["--integrity"],
            type=click.IntRange(min=1),
            is_flag=False,
            flag_value=DEFAULT,
            metavar="N",
            help="Compare the copies of the state while training: every byte once in N steps "
            f"(without a number: {DEFAULT}).",
        )
    ]


@hookimpl
# `Any`, because the options of the command line have values of several types
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:
    steps, backups = options["integrity"], options.get("backup_every", 0)
    if steps is None:
        return {}
    if 0 < backups < steps:
        raise UsageError(
            f"--backup-every {backups} is less than --integrity {steps}: a backup may be "
            "overwritten only after every byte of the state was compared once between ranks; give "
            f"--backup-every at least {steps}"
        )
    return {VARIABLE: str(steps)}


@hookimpl
def tft_opened(session: SessionView) -> object | None:
    steps = int(os.environ.get(VARIABLE, "0"))
    return Digester(session, slices(steps)) if steps else None


def slices(steps: int) -> int:
    """
    Return the number of slices into which each shard is divided, so that the controller knows of a
    difference between copies within `steps` steps.
    """
    return max(1, steps - max(ON_THE_WAY, steps // SHARE))
