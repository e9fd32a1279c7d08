"""
The plugin of `tft run --numerics refuse`: prevents updates with NaN, Inf or a sudden spike in the
loss or in the norm of the gradients (see `docs/howto/numerics.md`).

The plugin acts on a job only through the hooks of `tft.spi`. It only refuses an update; the
controller then decides how the job continues.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tft.errors import UsageError
from tft.spi import SessionView, hookimpl
from tft_numerics.judge import MODES, SPIKE, Judge, Settings

VARIABLE = "TFT_NUMERICS"
"""The environment variable that carries the settings of the plugin to every process of the job, as
a JSON object."""


@hookimpl
def tft_options() -> Sequence[click.Option]:
    return [
        click.Option(
            ["--numerics"],
            metavar="MODE",
            default="off",
            show_default=True,
            help="refuse: no rank applies an update with NaN, Inf or a spike; watch: log them; off.",
        ),
        click.Option(
            ["--numerics-spike"],
            type=float,
            default=SPIKE,
            show_default=True,
            metavar="FACTOR",
            help="How many deviations above its median a loss or norm is a spike; 0: none is.",
        ),
        click.Option(
            ["--numerics-limit"],
            type=float,
            metavar="NORM",
            help="Refuse updates with a larger norm of the gradients.",
        ),
    ]


@hookimpl
# `Any`, because the options of the command line have values of several types
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:
    mode, spike, limit = (options[f"numerics{each}"] for each in ("", "_spike", "_limit"))
    if mode not in ("off", *MODES):
        raise UsageError(
            f"--numerics {mode} is not a known mode: expected is off, {' or '.join(MODES)}"
        )
    if not 0 <= spike < math.inf:
        raise UsageError(f"--numerics-spike {spike}: expected is a number, 0 or larger")
    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(f"--numerics-limit {limit}: expected is a number larger than 0")
    if mode == "off":
        if limit is not None:
            raise UsageError("--numerics-limit does nothing without --numerics watch or refuse")
        return {}
    settings = {"mode": mode, "spike": spike, "limit": limit}
    return {VARIABLE: json.dumps(settings)}


@hookimpl
def tft_opened(session: SessionView) -> object | None:
    carried = os.environ.get(VARIABLE)
    return None if not carried else Judge(session, Settings(**json.loads(carried)))
