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
"""The variable that carries N to every process of the job."""
DEFAULT = 50
"""The N that `--integrity` stands for if no number is given."""
ON_THE_WAY = 2
"""The least number of steps for which digests may be under way to the controller. A shard has so
many slices fewer than N, so that the controller knows of a difference within N steps. If steps are
much shorter than the time between two beats of an agent, it may know some steps later."""
SHARE = 8
"""If N is more than 16, one step in this many is for the way to the controller: a beat then brings
the digests of several short steps."""


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
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:  # Any: values of all options
    steps, backups = options["integrity"], options.get("backup_every", 0)
    if steps is None:
        return {}
    if 0 < backups < steps:
        raise UsageError(
            f"--backup-every {backups} is less than --integrity {steps}: a copy may be overwritten "
            "only after every byte was compared once; use at least the same number of steps"
        )
    return {VARIABLE: str(steps)}


@hookimpl
def tft_opened(session: SessionView) -> object | None:
    steps = int(os.environ.get(VARIABLE, "0"))
    return Digester(session, slices(steps)) if steps else None


def slices(steps: int) -> int:
    """
    Return the number of slices, so that a difference is known after `steps` steps.
    """
    return max(1, steps - max(ON_THE_WAY, steps // SHARE))
