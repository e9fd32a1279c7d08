"""
Chaos: deliberate faults for tests and demonstrations, which `tft run --chaos SPEC` makes (see
`docs/reference/chaos.md`).

This package is an ordinary plugin: it acts on a job only through the hooks of `tft.spi`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from tft.errors import UsageError
from tft.spi import SessionView, hookimpl
from tft_chaos.outside import strike_processes
from tft_chaos.record import Ledger
from tft_chaos.spec import Process, Ranks, Spec, parse
from tft_chaos.striker import open_striker

VARIABLE = "TFT_CHAOS"
"""The environment variable that carries the specs, the arguments of `--chaos`, to every process of
the job as a JSON list."""


@hookimpl
def tft_options() -> Sequence[click.Option]:
    return [
        click.Option(
            ["--chaos"],
            multiple=True,
            metavar="SPEC",
            help="Make a fault: ACTION:TARGET[,key=value...], e.g. kill:rank=2,step=30,phase=update.",
        )
    ]


@hookimpl
# `Any`, because the options of the command line have values of several types
def tft_environment(options: Mapping[str, Any]) -> Mapping[str, str]:
    texts = list(options["chaos"])
    nodes = options["nnodes"]
    for text in texts:
        match parse(text).target:
            case Ranks(ranks=ranks) if max(ranks) >= nodes * options["nproc_per_node"]:
                last = nodes * options["nproc_per_node"] - 1
                raise UsageError(
                    f"--chaos {text}: there is no rank {max(ranks)}; the job has ranks 0 to {last}"
                )
            case Process(node=node) if node >= nodes:
                raise UsageError(
                    f"--chaos {text}: there is no agent {node}; the job has agents 0 to {nodes - 1}"
                )
            case _:
                pass
    return {VARIABLE: json.dumps(texts)} if texts else {}


@hookimpl
def tft_opened(session: SessionView) -> object | None:
    return open_striker(_specs(os.environ.get(VARIABLE, "[]")), session)


@hookimpl
def tft_progressed(run_dir: Path, node: int, step: int) -> None:
    strike_processes(_specs(os.environ.get(VARIABLE, "[]")), run_dir, node, step)


@hookimpl
def tft_fault_moment(run_dir: Path, kind: str, rank: int | None, seen: float) -> float | None:
    return Ledger(run_dir).moment(kind, rank, seen)


@cache  # an agent needs the same parsed specs after every step, so parse them only once
def _specs(carried: str) -> tuple[Spec, ...]:
    return tuple(parse(text) for text in json.loads(carried))
