"""
Runs many schedules in several processes, and counts their results.
"""

import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tft.core.job.transitions import REACTIONS, UNREACHABLE, State
from tft.simulation.run import Outcome, run
from tft.simulation.schedule import Schedule, draw
from tft.simulation.stage import Seen

SHARE = 50
"""The number of schedules that a worker process takes at a time."""


@dataclass(slots=True)
class Tally:
    """
    The counts of the results of many simulated runs.
    """

    runs: int = 0
    worlds: list[int] = field(default_factory=list)
    mishaps: "Counter[int]" = field(default_factory=Counter)
    """By number of mishaps (injected faults and requests) in a schedule: the number of such
    schedules."""
    faults: "Counter[int]" = field(default_factory=Counter)
    """By number of faults that happened in a run: the number of such runs."""
    kinds: "Counter[str]" = field(default_factory=Counter)
    results: "Counter[str]" = field(default_factory=Counter)
    seen: Seen = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    """The processor time of the runs in seconds."""

    @property
    def missed(self) -> set[tuple[str, State]]:
        """
        The pairs of event kind and state of the job machine that did not occur in any run.
        """
        every = {(kind, state) for kind, row in REACTIONS.items() for state in row}
        return every - {(kind, state) for state, kind in self.seen}

    def add(self, outcome: Outcome) -> None:
        """
        Count the result of one run.
        """
        schedule = outcome.schedule
        self.runs += 1
        self.worlds.append(schedule.world)
        self.mishaps[len(schedule.mishaps)] += 1
        self.faults[outcome.faults] += 1
        self.kinds.update(mishap.what for mishap in schedule.mishaps)
        self.results[outcome.result] += 1
        self.seen.update(outcome.seen)
        if outcome.broken:
            self.failed.append(outcome)

    def merge(self, other: "Tally") -> None:
        """
        Add the counts of another tally.
        """
        self.runs += other.runs
        self.worlds += other.worlds
        self.mishaps.update(other.mishaps)
        self.faults.update(other.faults)
        self.kinds.update(other.kinds)
        self.results.update(other.results)
        self.seen.update(other.seen)
        self.failed += other.failed
        self.seconds += other.seconds


def run_many(seeds: Sequence[int], *, jobs: int, written: Sequence[Schedule] = ()) -> Tally:
    """
    Run the schedules of these seeds, and the `written` schedules, in `jobs` processes. If `jobs` is
    1, run all schedules in this process. Return the counts of the results.
    """
    every: tuple[int | Schedule, ...] = (*written, *seeds)
    shares = [every[at : at + SHARE] for at in range(0, len(every), SHARE)]
    tally = Tally()
    if jobs == 1:
        for share in shares:
            tally.merge(_run_share(share))
        return tally
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part in pool.imap(_run_share, shares):
            tally.merge(part)
    return tally


def _run_share(schedules: Sequence[int | Schedule]) -> Tally:
    tally = Tally()
    began = time.process_time()
    for each in schedules:
        tally.add(run(each if isinstance(each, Schedule) else draw(each)))
    tally.seconds = time.process_time() - began
    return tally


def show(tally: Tally) -> str:
    """
    Return a text that summarizes a tally.
    """
    worlds = sorted(tally.worlds)
    quarters = [worlds[len(worlds) * part // 4] for part in (1, 2, 3)]
    bins = Counter(min(world // 8, 8) * 8 for world in worlds)
    mean = sum(n * count for n, count in tally.mishaps.items()) / tally.runs
    faults = sum(n * count for n, count in tally.faults.items()) / tally.runs
    lines = [
        f"{tally.runs} schedules, {1000 * tally.seconds / tally.runs:.1f} ms of processor time "
        "each",
        f"worlds: quarters end at {quarters}; "
        + ", ".join(f"{low}-{low + 7}: {bins[low]}" for low in sorted(bins)),
        f"mishaps: {mean:.2f} a schedule; faults that happened: {faults:.2f}; "
        + ", ".join(f"{n}: {count}" for n, count in sorted(tally.faults.items())),
        "kinds: " + ", ".join(f"{kind} {n}" for kind, n in sorted(tally.kinds.items())),
        "results: " + ", ".join(f"{result} {n}" for result, n in sorted(tally.results.items())),
    ]
    broken = Counter(outcome.broken for outcome in tally.failed)
    lines.append(
        "broken invariants: "
        + (", ".join(f"{what} {n}" for what, n in broken.most_common()) or "none")
    )
    lines += [f"  seed {o.schedule.seed}: {o.how}" for o in tally.failed[:30]]
    return "\n".join(lines) + "\n"


def show_pairs(tally: Tally) -> str:
    """
    Return a text that lists how often each kind of event occurred in each state of the job machine,
    and which pairs of event and state did not occur.
    """
    every = len(tally.seen) + len(tally.missed)
    lines = [f"{len(tally.seen)} of {every} pairs of state and event:"]
    states = sorted({state for state, _ in tally.seen})
    for state in states:
        events = ", ".join(
            f"{kind} {n}" for (at, kind), n in sorted(tally.seen.items()) if at == state
        )
        lines.append(f"  {state}: {events}")
    for title, pairs in (
        ("that are impossible", UNREACHABLE.keys() & tally.missed),
        ("that did not occur", tally.missed - UNREACHABLE.keys()),
        ("that occurred although they are called impossible", UNREACHABLE.keys() - tally.missed),
    ):
        named = ", ".join(f"{kind} in {state}" for kind, state in sorted(pairs))
        lines.append(f"{len(pairs)} pairs {title}: {named or 'none'}")
    return "\n".join(lines) + "\n"
