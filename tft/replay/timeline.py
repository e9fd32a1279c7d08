"""
The timeline of a replayed run, as lines of text. It shows the events with their times, the
decisions with their reasons, and how long the incidents took.

When several ranks send reports of the same kind, such as answers to one order, one line shows all
these reports. The line has the time of the last report.

All times in the timeline come from the controller's clock, because the times of clocks on different
machines cannot be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from tft.core.job.commands import Command, Tell
from tft.core.job.events import (
    CorruptionTraced,
    DeadlinePassed,
    Led,
    Received,
    SlicesAgreed,
    SlicesDiffered,
    Stalled,
)
from tft.core.job.incident import Fault, Incident
from tft.core.job.incident_report import incident_report
from tft.protocol.messages import (
    ORDER_NAMES,
    Answered,
    Checkpointed,
    CheckpointFailed,
    Exited,
    Faulted,
    Finished,
    Joined,
    RankOrder,
    Ready,
    Report,
    Spawned,
    Trained,
)
from tft.replay.judging import Replay, Stand, Turn
from tft.replay.sentences import (
    Alike,
    alike,
    commanded,
    fault_in_words,
    particulars,
    sentence,
    span,
)
from tft.sentences import ranks_of

Key = tuple[object, ...]


def timeline(replay: Replay) -> list[str]:
    """
    Return the lines of the timeline, without line ends.

    The start of the job comes first. Then come the incidents, and between them the events that
    belong to no incident. Times in an incident are seconds since the event that opened the
    incident. Other times are seconds since the start of the run.
    """
    return _Timeline(replay).told()


@dataclass(slots=True, kw_only=True)
class _Chorus:
    """
    Reports of several ranks that the timeline shows in one line, such as their answers to one
    order.
    """

    last: Turn
    said: dict[int, Alike] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Asked:
    """
    The time when an order was first sent, and the ranks to which the order has been sent so far.
    """

    at: float
    ranks: set[int]


class _Timeline:
    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._choruses = _choruses(replay)
        self._asked: dict[Key, _Asked] = {}
        machine = replay.machine
        self._incidents = {i.number: i for i in (*machine.incidents, machine.incident)}
        self._zero = replay.run.opened.at
        self._lines: list[str] = []

    def told(self) -> list[str]:
        """
        Return all lines of the timeline.
        """
        within: int | None = None
        for turn in self._replay.turns:
            number = _incident_of(turn)
            if number != within:
                self._end_section(within)
                self._begin_section(number, turn)
                within = number
            self._turn(turn)
        if (failed := self._replay.failed_at) is not None:
            self._say(failed.event.at, f"the machine fails: {self._replay.failure}")
        self._end_section(within)
        return self._lines

    # ---------------------------------------------------------------- sections of the timeline

    def _begin_section(self, number: int, turn: Turn) -> None:
        start = self._replay.run.opened.at
        if number == 0:
            self._zero = start
            ends = turn.before.state in ("exiting", "ended")
            then = "the job ends" if ends else "the job goes on"
            heading = then if self._lines else "the job starts"
        else:
            self._zero = turn.recorded.event.at
            what = "; ".join(map(fault_in_words, self._incidents[number].roots()))
            heading = f"incident {number}, {self._zero - start:.3f} s: {what or 'no fault'}"
        self._lines += [*([""] if self._lines else []), heading]

    def _end_section(self, number: int | None) -> None:
        if number:
            self._lines.append(f"{'':>12}  {_outcome(self._incidents[number])}")

    # ---------------------------------------------------------------- one event and its commands

    def _turn(self, turn: Turn) -> None:
        said = self._happened(turn)
        decided = list(_decided(turn))
        if said or decided:
            self._say(turn.recorded.event.at, said or "")
        self._lines += [f"{'':>12}    {line}" for line in decided]
        self._ask(turn.commands, turn.recorded.event.at)

    def _say(self, at: float, said: str) -> None:
        self._lines.append(f"{f'{at - self._zero:+.3f} s':>12}  {said}".rstrip())

    def _ask(self, commands: Sequence[Command], at: float) -> None:
        """
        Record the ranks to which each order was sent, and the time. Later, the line about the
        answers to an order says whether all these ranks have answered, and how long they took.
        """
        for order in commands:
            if isinstance(order, RankOrder):
                key = ("Answered", order.incident, order.round, ORDER_NAMES[type(order)])
                self._asked.setdefault(key, _Asked(at=at, ranks=set())).ranks.update(order.to)

    def _happened(self, turn: Turn) -> str:
        event = turn.recorded.event
        match event:
            case Received(message=message):
                key = _key(turn)
                return sentence(message) if key is None else self._together(key, turn)
            case DeadlinePassed():
                idle = not turn.commands and turn.before == turn.after
                return "" if idle else "time is up"
            case Stalled(silence=silence, limit=limit, out=out):
                what = "all ranks were out of their loops" if out else "no rank has moved"
                return f"{what} for {silence:.1f} s, where {limit:.1f} s are the limit"
            case SlicesAgreed(step=step):
                return f"all copies were equal at the end of step {step}"
            case SlicesDiffered(shard=shard, step=step, wrong=wrong, right=right):
                known = f"; the copies of {ranks_of(right)} count" if right else ""
                return f"{ranks_of(wrong)} hold another copy of {shard} of step {step}{known}"
            case CorruptionTraced(ranks=ranks, step=step):
                return f"{ranks_of(ranks)} had a wrong copy since step {step}"
            case Led(epoch=epoch):
                return f"the controller of epoch {epoch} leads"
            case _:
                assert_never(event)

    def _together(self, key: Key, turn: Turn) -> str:
        """
        Return the line for reports of several ranks that the timeline shows together, because the
        reports have the same `key`. Return "" unless the event of `turn` is the last of these
        reports.
        """
        chorus = self._choruses[key]
        if chorus.last is not turn:
            return ""
        ranks, said = set(chorus.said), list(chorus.said.values())
        asked = self._asked.get(key)
        everyone = asked is not None and len(asked.ranks) > 2 and asked.ranks == ranks
        who = f"all {len(ranks)} ranks" if everyone else ranks_of(ranks)
        within = "" if asked is None else f" within {span(turn.recorded.event.at - asked.at)}"
        what = particulars(said)
        return f"{who} {alike(said)}{within}{what and '; '}{what}"


# ---------------------------------------------------------------- keys and texts of lines


def _choruses(replay: Replay) -> dict[Key, _Chorus]:
    choruses: dict[Key, _Chorus] = {}
    for turn in replay.turns:
        key = _key(turn)
        event = turn.recorded.event
        if key is not None and isinstance(event, Received) and isinstance(event.message, Alike):
            chorus = choruses.setdefault(key, _Chorus(last=turn))
            # a second report of the same rank with the same key is a repetition: leave it out
            if event.message.rank not in chorus.said:
                chorus.last = turn
                chorus.said[event.message.rank] = event.message
    return choruses


def _key(turn: Turn) -> Key | None:
    """
    Return the key of the report in a turn (an event and the commands for it). Reports with the same
    key are shown in one line. Return None for a report that has a line of its own, and for an event
    that is not a report.
    """
    event = turn.recorded.event
    return _key_of(event.message, turn.before) if isinstance(event, Received) else None


def _key_of(message: Report, stand: Stand) -> Key | None:
    match message:
        case Answered(failure=None, verdict="pass"):
            return ("Answered", message.incident, message.round, message.order)
        case Joined() | Ready() | Spawned() | Trained() | Finished():
            return (type(message).__name__, stand.incident, stand.round, stand.open)
        case Checkpointed(directory=directory):
            return ("Checkpointed", directory)
        case CheckpointFailed(step=step, why=why):
            return ("CheckpointFailed", step, why)
        case Exited(code=code) if stand.state in ("exiting", "ended") and code >= 0:
            return ("Exited", code)
        # one failure of the network makes many ranks report a fault: show their reports in one line
        case Faulted(kind="network", step=step) if stand.open:
            return ("Faulted", stand.incident, stand.round, step)
        case _:
            return None


def _incident_of(turn: Turn) -> int:
    """
    Return the number of the incident that a turn (an event and the commands for it) opens, closes
    or belongs to. Return 0 if the turn belongs to no incident.
    """
    opened = turn.after.incident if turn.after.open else 0
    return opened or (turn.before.incident if turn.before.open else 0)


def _decided(turn: Turn) -> list[str]:
    """
    Return the lines about what the job machine decided in a turn (an event and the commands for
    it). The lines name the chosen strategy, the rejected strategies with the reasons, the commands,
    and the new state of the job.
    """
    lines: list[str] = []
    chosen = (turn.after.round, turn.after.strategy)
    if turn.after.strategy and chosen != (turn.before.round, turn.before.strategy):
        told = (command for command in turn.commands if isinstance(command, Tell))
        reasons = [tell.facts["why"] for tell in told if tell.event == "strategy_chosen"]
        lines.append(": ".join(["chosen", turn.after.strategy, *map(str, reasons)]))
        lines += [f"  not {name}: {why}" for name, why in turn.after.tried]
    lines += [f"→ {order}" for order in commanded(turn.commands)]
    if turn.after.state != turn.before.state:
        lines.append(f"[{turn.after.state}]")
    return lines


def _outcome(incident: Incident) -> str:
    """
    Return a text about how an incident ended, and how long the parts of its recovery took.
    """
    if incident.closed is None:
        return "not over here"
    seconds = incident_report(incident, _nobody_knows)["seconds"]
    assert isinstance(seconds, dict)
    took = ", ".join(f"{name} {span(took)}" for name, took in seconds.items() if took)
    ended = incident.decision.strategy in ("dump", "exit")
    next_step = (
        ""
        if ended or incident.progress.step is None
        else f", on with step {incident.progress.step}"
    )
    lost = (
        "1 step" if incident.progress.steps_lost == 1 else f"{incident.progress.steps_lost} steps"
    )
    return f"over: {incident.decision.strategy}{next_step}, {lost} lost; it took {took}"


def _nobody_knows(fault: Fault) -> float | None:
    return None
