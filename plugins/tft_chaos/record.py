"""
What chaos has done: a file for every time a spec fired, written before it fires.

The files outlive every process of the job, so what has fired never fires again: not in the
process that takes the victim's place, and not after `--resume`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import assert_never

from tft_chaos.spec import Action, Bitflip, Hang, Kill, Process, Raise, Slow, Stop, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """
    One strike.
    """

    spec: str
    """As it was given."""
    at: float
    """CLOCK_MONOTONIC, just before."""
    rank: int | None
    """The rank struck; None where the target was a process of tft's own."""
    incarnation: int | None
    step: int
    phase: str | None
    evidence: Mapping[str, object]
    """How it is known that the victim was where the spec wants it."""


class Ledger:
    """
    The firings of a run, in `chaos/INDEX-TIME.json` of its directory: the spec's place on the
    command line from 0, and the how manieth time it fired, from 1.
    """

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "chaos"

    def fired(self, index: int) -> int:
        """
        How often this spec has fired.
        """
        return len(list(self.directory.glob(f"{index}-*.json")))

    def enter(self, index: int, time: int, firing: Firing) -> bool:
        """
        Write a firing down; False when it stands there already, and must not happen.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{index}-{time}.{os.getpid()}"
        draft.write_text(json.dumps(asdict(firing)) + "\n")
        try:
            os.link(draft, self.directory / f"{index}-{time}.json")  # whole, or not at all
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def firings(self) -> Iterator[Firing]:
        """
        All of them, in no order.
        """
        for path in self.directory.glob("*.json"):
            yield Firing(**json.loads(path.read_text()))

    def moment(self, kind: str, rank: int | None, seen: float) -> float | None:
        """
        When the fault of this kind, first seen at this moment, was made; None: not by chaos.
        """
        return max(
            (
                firing.at
                for firing in self.firings()
                if firing.at <= seen and _explains(firing, kind, rank)
            ),
            default=None,
        )


def _explains(firing: Firing, kind: str, rank: int | None) -> bool:
    spec = parse(firing.spec)
    if isinstance(spec.target, Process):
        return kind == "node" and spec.target.name.startswith("agent-")
    return firing.rank == rank and kind in _seen_as(spec.action)


def _seen_as(action: Action) -> tuple[str, ...]:
    """
    The kinds of fault an action on a rank can be taken for.
    """
    match action:
        case Kill():
            return ("process",)
        case Stop() | Hang():
            return ("hang", "process")  # it is ended for hanging; its end may be seen first
        case Raise(kind=kind):
            return ("software" if kind == "bug" else kind,)
        case Bitflip():
            return ("numeric",)
        case Slow():
            return ()
        case _:
            assert_never(action)
