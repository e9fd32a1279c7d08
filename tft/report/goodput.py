"""
Computes how the time of a run was spent: the goodput, and the time lost for each kind of reason.
The parts add up to the time of the run. `docs/reference/report.md` defines each part. This module
reads no clock and does no I/O.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tft.core.job.transitions import State
from tft.report.progress import Change, RunProgress, Sample

TRAINING = "training"
AGAIN = "again"
INCIDENT = "incident"
START = "start"
PAUSE = "pause"
STANDING = "standing"
END = "end"
KINDS = (TRAINING, AGAIN, INCIDENT, START, PAUSE, STANDING, END)
"""The kinds of parts, in the order in which they are shown. There is one part of the kind INCIDENT
for each strategy."""
STILL_FACTOR = 10
"""The job counts as standing still when it has completed no step for this many median step
times."""
STILL_FLOOR = 2.0
"""The job never counts as standing still when it has completed no step for less than this many
seconds, because the rows about steps are a second apart."""
LAST = ("dump", "exit")
"""The strategies that end the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """
    What the report or the story says about an incident.
    """

    strategy: str
    total: float | None
    """The seconds from the fault until all ranks had completed a step again. None: not known."""
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """
    A time of the run that was spent in one way. `start` and `end` are seconds since the run began.
    """

    kind: str
    start: float
    end: float
    incident: int = 0

    @property
    def seconds(self) -> float:
        """
        The length of the span.
        """
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    All time of a run that was spent in one way. For incidents, there is a part for each `strategy`:
    `undecided` if an incident has no strategy yet, and `unknown` if neither the report nor the
    story can be read. For all other kinds, `strategy` is empty.
    """

    kind: str
    seconds: float
    strategy: str = ""
    times: int = 0
    """How many incidents, pauses or other spans the part has. For AGAIN: how many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """
    How the time of a run was spent.
    """

    wall: float
    parts: tuple[Part, ...]
    step_time: float | None
    """The median time of a step in seconds. None: too few steps were trained."""
    spans: tuple[Span, ...] = ()

    @property
    def share(self) -> float:
        """
        The goodput: the share of the time that went into steps that were kept, and not computed
        again later. 0 if the run took no time.
        """
        kept = sum(part.seconds for part in self.parts if part.kind == TRAINING)
        return kept / self.wall if self.wall else 0.0


def goodput(
    progress: RunProgress,
    incidents: Mapping[int, Known],
    until: float,
    *,
    continued_from: int | None = None,
) -> Goodput:
    """
    Return how the time of a run was spent, from its beginning to the time `until`. `incidents` has
    what is known of its incidents, by their number. `continued_from` is the earliest step from
    which a later run has continued; None if there is no later run.
    """
    began, until = progress.opened, max(until, progress.last)
    spans = _spans(progress, incidents, until)
    step_time = _step_time(progress, spans)
    spans = [each for span in spans for each in _still(span, progress.samples, step_time)]
    lost = sum(known.steps_lost for known in incidents.values())
    if continued_from is not None:
        reached = progress.step + _unseen(progress, spans, step_time)
        lost += max(0, reached - max(continued_from, progress.began_after))
    parts = _parts(spans, incidents, lost, step_time)
    shifted = (replace(s, start=s.start - began, end=s.end - began) for s in spans)
    return Goodput(wall=until - began, parts=parts, step_time=step_time, spans=tuple(shifted))


def together(runs: Sequence[Goodput]) -> Goodput:
    """
    Return how the time of several runs was spent together. The time between two runs is not
    counted.
    """
    parts: dict[tuple[str, str], Part] = {}
    for part in (part for run in runs for part in run.parts):
        key = part.kind, part.strategy
        known = parts.get(key, replace(part, seconds=0.0, times=0))
        seconds, times = known.seconds + part.seconds, known.times + part.times
        parts[key] = replace(known, seconds=seconds, times=times)
    return Goodput(
        wall=sum(run.wall for run in runs),
        parts=tuple(sorted(parts.values(), key=lambda part: KINDS.index(part.kind))),
        step_time=runs[-1].step_time if len(runs) == 1 else None,
    )


def lately(run: Goodput, lost: Mapping[int, int], seconds: float) -> float:
    """
    Return the goodput of the last `seconds` seconds of one run, as a share. `lost` maps the number
    of an incident to the number of steps that were computed again because of the incident.
    """
    start = max(0.0, run.wall - seconds)
    kept = sum(
        span.end - max(start, span.start)
        for span in run.spans
        if span.kind == TRAINING and span.end > start
    )
    again = sum(lost.get(s.incident, 0) for s in run.spans if s.kind == INCIDENT and s.end > start)
    kept = max(0.0, kept - again * (run.step_time or 0.0))
    return kept / (run.wall - start) if run.wall > start else 0.0


# ---------------------------------------------------------------- spans


def _spans(progress: RunProgress, incidents: Mapping[int, Known], until: float) -> list[Span]:
    """
    Return the spans of a run, without gaps, from its beginning to `until`.
    """
    spans = [Span(kind=START, start=progress.opened, end=progress.opened)]
    ends = [*(change.at for change in progress.changes[1:]), until]
    started = paused = False
    # not strict, because a run without changes has an end too, the time `until`
    for change, end in zip(progress.changes, ends, strict=False):
        started = started or change.state == State.HEALTHY
        paused = change.state == State.PAUSED or (paused and change.state == State.RESUMING)
        kind = _kind(change, started=started, paused=paused)
        last = spans[-1]
        start, end = max(last.end, change.at), max(last.end, end)
        if (last.kind, last.incident) == (kind, change.incident):
            spans[-1] = replace(last, end=end)
        else:
            spans[-1] = replace(last, end=start)
            spans.append(Span(kind=kind, start=start, end=end, incident=change.incident))
    spans[-1] = replace(spans[-1], end=max(until, spans[-1].end))
    return [span for span in _from_faults(spans, incidents) if span.seconds > 0]


def _kind(change: Change, *, started: bool, paused: bool) -> str:
    if change.incident:
        return INCIDENT
    if change.state in (State.CONFIRMING, State.EXITING, State.ENDED):
        return END
    if not started:
        return START
    if paused:
        return PAUSE
    training = change.state in (State.HEALTHY, State.PAUSING, State.RESUMING)
    return TRAINING if training else STANDING


def _from_faults(spans: Iterable[Span], incidents: Mapping[int, Known]) -> list[Span]:
    """
    Move the beginning of each incident back to the time of its fault, which is earlier than the
    first evidence of the fault. Turn an incident that has ended the job into a span of the kind
    END.
    """
    found: list[Span] = []
    for span in spans:
        known = incidents.get(span.incident) if span.kind == INCIDENT else None
        if known is not None and known.total is not None and found:
            before = found[-1]
            start = min(span.start, max(before.start, span.end - known.total))
            found[-1], span = replace(before, end=start), replace(span, start=start)
        if known is not None and known.strategy in LAST:
            span = replace(span, kind=END)
        found.append(span)
    return found


def _still(span: Span, samples: Sequence[Sample], step_time: float | None) -> list[Span]:
    """
    Split a span of training into spans in which steps were completed, and spans of the kind
    STANDING. Return a span of any other kind as it is.
    """
    if span.kind != TRAINING or step_time is None:
        return [span]
    found: list[Span] = []
    begun, at, step = span.start, span.start, -1
    for sample in (*_within(samples, span), Sample(at=span.end, step=-1, ranks=0)):
        moved = sample.step - step if step >= 0 and sample.step >= 0 else 1
        excess = sample.at - at - max(1, moved) * step_time
        if excess > max(STILL_FACTOR * step_time, STILL_FLOOR):
            still = sample.at - excess
            found.append(replace(span, start=begun, end=still))
            found.append(Span(kind=STANDING, start=still, end=sample.at))
            begun = sample.at
        if sample.step != step:
            at, step = sample.at, sample.step
    return [s for s in (*found, replace(span, start=begun)) if s.seconds > 0]


# ---------------------------------------------------------------- steps


def step_times(samples: Sequence[Sample], spans: Iterable[Span]) -> list[tuple[float, float, int]]:
    """
    Return the time of a step between every two successive samples within one span of training: the
    time of the second sample, the seconds for each step, and the number of steps. The times of
    spans and samples must count from the same moment.
    """
    found = []
    for span in spans:
        if span.kind == TRAINING:
            found += [
                (after.at, (after.at - before.at) / (after.step - before.step), steps)
                for before, after in pairwise(_within(samples, span))
                if (steps := after.step - before.step) > 0
            ]
    return found


def _within(samples: Sequence[Sample], span: Span) -> Sequence[Sample]:
    first = bisect_left(samples, span.start, key=lambda sample: sample.at)
    last = bisect_right(samples, span.end, key=lambda sample: sample.at)
    return samples[first:last]


def _step_time(progress: RunProgress, spans: Sequence[Span]) -> float | None:
    """
    Return the median time of a step. Every step counts once, also if a sample covers several steps.
    Without two samples in one span of training, return the mean time, or None if that is not known
    either.
    """
    times = sorted((seconds, steps) for _, seconds, steps in step_times(progress.samples, spans))
    half, count = sum(steps for _, steps in times) / 2, 0
    for seconds, steps in times:
        count += steps
        if count >= half:
            return seconds
    trained = progress.step - progress.from_step
    seconds = sum(span.seconds for span in spans if span.kind == TRAINING)
    return seconds / trained if trained > 0 and seconds else None


def _unseen(progress: RunProgress, spans: Sequence[Span], step_time: float | None) -> int:
    """
    Return how many steps a run that was killed may have trained after its last row about steps.
    """
    if not (spans and spans[-1].kind == TRAINING and progress.samples and step_time):
        return 0
    since = max(spans[-1].start, progress.samples[-1].at)
    return max(0, int((spans[-1].end - since) / step_time))


# ---------------------------------------------------------------- parts


def _parts(
    spans: Sequence[Span], incidents: Mapping[int, Known], lost: int, step_time: float | None
) -> tuple[Part, ...]:
    seconds: dict[tuple[str, str], float] = {(kind, ""): 0.0 for kind in KINDS if kind != INCIDENT}
    times: dict[tuple[str, str], set[float]] = {}
    for span in spans:
        known = incidents.get(span.incident)
        strategy = "unknown" if known is None else known.strategy or "undecided"
        key = span.kind, strategy if span.kind == INCIDENT else ""
        seconds[key] = seconds.get(key, 0.0) + span.seconds
        times.setdefault(key, set()).add(span.start)
    again = min(lost * (step_time or 0.0), seconds[TRAINING, ""])
    seconds[TRAINING, ""] -= again
    seconds[AGAIN, ""] = again
    counts = {**{key: len(starts) for key, starts in times.items()}, (AGAIN, ""): lost}
    return tuple(
        Part(kind=kind, strategy=strategy, seconds=took, times=counts.get((kind, strategy), 0))
        for (kind, strategy), took in sorted(
            seconds.items(), key=lambda entry: (KINDS.index(entry[0][0]), entry[0][1])
        )
    )
