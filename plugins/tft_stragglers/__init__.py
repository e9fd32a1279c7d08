"""
The plugin of `tft run --stragglers`: reports slow ranks, for which all other ranks must wait, with
the cause (see `docs/howto/stragglers.md`).

Each rank measures how long its own work takes in each step, and sends these times with the
heartbeats. The plugin compares the times in the controller. It changes nothing in the job.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import click
import structlog

from tft.spi import RankBeat, Remark, SessionView, hookimpl
from tft_stragglers.judge import Judge

log = structlog.get_logger()

VARIABLE = "TFT_STRAGGLERS"
"""The environment variable that carries the number given to `--stragglers` to every process of the
job."""
DEFAULT = 5.0


@hookimpl
def tft_options() -> Sequence[click.Option]:
    return [
        click.Option(
            ["--stragglers"],
            type=click.FloatRange(min=0, max=1000),
            default=DEFAULT,
            show_default=True,
            metavar="PERCENT",
            help="Name ranks whose own work takes longer than that of others by this much; 0: none.",
        )
    ]


@hookimpl
# `Any`, because the options of the command line have values of several types
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:
    return {VARIABLE: str(options["stragglers"])}


@hookimpl
def tft_opened(session: SessionView) -> object | None:
    if _percent():
        session.measure_work()
    return None


@hookimpl
def tft_on_beat(node: int, ranks: Sequence[RankBeat]) -> Sequence[Remark]:
    judge = _judge()
    return [] if judge is None else judge.heard(node, ranks)


@cache
def _percent() -> float:
    """
    Return the number given to `--stragglers`, which the environment variable `VARIABLE` carries. If
    the variable is not set, return the default. That is the case in a controller that `tft lead`
    has started, unless the operator sets the variable.
    """
    value = os.environ.get(VARIABLE, "")
    try:
        return float(value) if value else DEFAULT
    except ValueError:
        log.warning(
            "stragglers_off", why=f"{VARIABLE} is {value!r}: expected is a number of percent"
        )
        return 0.0


@cache
def _judge() -> Judge | None:
    # cached, because all heartbeats must reach the same judge, which stores the times of earlier
    # steps
    percent = _percent()
    return Judge(percent / 100) if percent > 0 else None
