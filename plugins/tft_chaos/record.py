"""
The record of the faults that chaos has made. It has one file for each fault, which is written
before the fault is made. The making of one fault is called a firing of its spec (the argument of
`--chaos`).

The files stay when a process of the job ends. So no fault is made a second time: neither by the
process that replaces a killed process, nor after `--resume`.
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
    One firing of a spec (an argument of `--chaos`), that is, one fault that the spec has made.
    """

    spec: str
    """The text of the spec as given on the command line."""
    at: float
    """The time just before the fault, in seconds by CLOCK_MONOTONIC of the machine with the rank."""
    rank: int | None
    """The rank that gets the fault. None if a process of tft gets the fault."""
    incarnation: int | None
    step: int
    phase: str | None
    evidence: Mapping[str, object]
    """Facts which show that the process was in the phase of the spec, such as how many gradients
    the process had computed."""


class Ledger:
    """
    The firings of a run (the faults that chaos has made), in the files `chaos/NAME-TIME.json` of
    the run directory.

    NAME is the number of the spec on the command line, counted from 0. If the spec is aimed at
    several ranks, each of these ranks has files of its own, and NAME ends with the rank, as in
    `0.rank2`. TIME is the number of the firing among the firings with the same NAME, counted from
    1.
    """

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "chaos"

    def fired(self, name: str) -> int:
        """
        Return how many firings (faults that chaos has made) are recorded under the name `name`.
        """
        return len(list(self.directory.glob(f"{name}-*.json")))

    def enter(self, name: str, time: int, firing: Firing) -> bool:
        """
        Write a firing (a fault that chaos is about to make) to its file, and return True. Return
        False if the file exists already, which means that the fault must not be made again.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{name}-{time}.{os.getpid()}"
        draft.write_text(json.dumps(asdict(firing)) + "\n")
        try:
            # `link` creates the file in one atomic step, and fails if the fault was recorded before
            os.link(draft, self.directory / f"{name}-{time}.json")
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def miss(self, name: str, spec: str, why: str) -> None:
        """
        Record in the file `chaos/missed/NAME.json` that the spec does not fit the job, and `why`.
        """
        place = self.directory / "missed"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps({"spec": spec, "why": why}) + "\n")

    def firings(self) -> Iterator[Firing]:
        """
        Yield all recorded firings (faults that chaos has made), in no particular order.
        """
        for path in self.directory.glob("*.json"):
            yield Firing(**json.loads(path.read_text()))

    def moment(self, kind: str, rank: int | None, seen: float) -> float | None:
        """
        Return the time at which chaos made the fault that tft has detected. Return None if chaos
        has not made such a fault.

        `kind` and `rank` are the kind and the rank of the fault as tft has detected it. `seen` is
        the time at which tft first detected it. Both times are in seconds of CLOCK_MONOTONIC.
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
    Return the kinds of fault that tft may detect after chaos has carried out `action` on a rank.
    """
    match action:
        case Kill():
            return ("process",)
        case Stop() | Hang():
            # tft kills the process of a rank that hangs, and may notice its end before the hang
            return ("hang", "process")
        case Raise(kind=kind):
            return ("software" if kind == "bug" else kind,)
        case Bitflip():
            return ("numeric",)
        case Slow():
            return ()
        case _:
            assert_never(action)
