"""
The two tables the job machine goes by. `TRANSITIONS`: from each state, where it may go; a move
that is not in it is our bug. `REACTIONS`: for every event in every state, what it leads to; the
machine looks up every event here. `docs/machine.md` shows both as they stand here.
"""

from collections.abc import Mapping
from enum import StrEnum

from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled


class State(StrEnum):
    """
    What the job as a whole is doing.
    """

    AWAITING = "awaiting"
    """Processes are starting; everyone else is parked."""
    REPAIRING = "repairing"
    """Lost state is being copied, groups are being formed."""
    REBUILDING = "rebuilding"
    """Wrappers are being built round the repaired state."""
    ROLLING_BACK = "rolling back"
    """RNG and data positions are being set to the agreed step."""
    RESUMING = "resuming"
    """Training again; success is announced after one more step of every member."""
    HEALTHY = "healthy"
    PAUSING = "pausing"
    """Everyone goes on to the same step boundary."""
    PAUSED = "paused"
    """Everyone stands there, maybe while a check runs."""
    FREEZING = "freezing"
    """Every rank is asked where it stands, and held back from its next update."""
    CLEARING = "clearing"
    """The training threads leave the loop and drop the broken groups."""
    CHOOSING = "choosing"
    """Recovery plugins are asked which strategy to follow; without one this takes no time."""
    DUMPING = "dumping"
    """The survivors write a last checkpoint."""
    EXITING = "exiting"
    """The ranks are leaving."""
    ENDED = "ended"
    """Nobody is left."""


S = State
TRANSITIONS: Mapping[State, frozenset[State]] = {
    S.AWAITING: frozenset({S.CHOOSING, S.REPAIRING, S.EXITING}),
    S.REPAIRING: frozenset({S.REBUILDING, S.FREEZING, S.EXITING}),
    S.REBUILDING: frozenset({S.ROLLING_BACK, S.FREEZING, S.EXITING}),
    S.ROLLING_BACK: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.RESUMING: frozenset({S.HEALTHY, S.FREEZING, S.EXITING}),
    S.HEALTHY: frozenset({S.PAUSING, S.FREEZING, S.EXITING}),
    S.PAUSING: frozenset({S.PAUSED, S.RESUMING, S.FREEZING, S.EXITING}),
    S.PAUSED: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.FREEZING: frozenset({S.CLEARING, S.FREEZING, S.EXITING}),
    S.CLEARING: frozenset({S.CHOOSING, S.FREEZING, S.EXITING}),
    S.CHOOSING: frozenset({S.CHOOSING, S.AWAITING, S.DUMPING, S.EXITING}),
    S.DUMPING: frozenset({S.DUMPING, S.EXITING}),
    S.EXITING: frozenset({S.ENDED}),
    S.ENDED: frozenset(),
}
"""A fault in any state in which somebody is in the loop or forms a group leads to FREEZING."""

SETTLED = frozenset({S.EXITING, S.ENDED})
"""The outcome is decided."""


class Reaction(StrEnum):
    """
    What an event leads to, beside what it says being kept.
    """

    NOTE = "notes"
    """It is kept, and the job moves on if that was all it waited for."""
    FREEZE = "freezes"
    """A fault: it opens an incident, or joins the one that is open, and a new round begins."""
    JOIN = "joins"
    """A fault: it joins the open incident, and what is under way goes on with the larger set."""
    REPLAN = "replans"
    """A fault: it joins the open incident, and what was decided is decided again."""
    FORCE = "ends"
    """Nothing but a last checkpoint comes into question any more, and the way there begins."""
    PAUSE = "pauses"
    """Everyone is brought to one step boundary."""
    LATER = "keeps"
    """It is kept until the job is healthy, and done then."""
    RELEASE = "releases"
    """Everyone goes on from where they stand."""
    SUSPECT = "suspects"
    """Everyone is frozen to see who does not wait for others."""
    DECIDE = "decides"
    """The advice is taken, and a strategy is followed."""
    EXPIRE = "expires"
    """Whoever owes an answer for too long is dealt with."""
    LEAD = "leads"
    """A new leader: every limit begins anew, all that is unanswered is said again."""
    ABSORB = "absorbs"
    """It is late, or nothing to us: nothing follows."""


R = Reaction


def _states(default: Reaction, exceptions: Mapping[State, Reaction]) -> dict[State, Reaction]:
    return {state: exceptions.get(state, default) for state in State}


_LATE = {S.EXITING: R.ABSORB, S.ENDED: R.ABSORB}
_KEPT = _states(R.NOTE, _LATE)
FAULTS = _states(
    R.FREEZE,
    {
        S.FREEZING: R.JOIN,
        S.CLEARING: R.JOIN,
        S.CHOOSING: R.REPLAN,
        S.AWAITING: R.REPLAN,
        S.DUMPING: R.REPLAN,
        **_LATE,
    },
)
"""What a fault leads to, however it became known."""

REACTIONS: Mapping[str, Mapping[State, Reaction]] = {
    "NodeJoined": {**_KEPT, S.EXITING: R.NOTE},
    "Spawned": _KEPT,
    "StoreOpened": {**_KEPT, S.REPAIRING: R.FREEZE},
    "Joined": _states(R.NOTE, {S.ENDED: R.ABSORB}),
    "Ready": _states(R.NOTE, {S.ENDED: R.ABSORB}),
    "Exited": {**FAULTS, S.EXITING: R.NOTE, S.ENDED: R.NOTE},
    "NodeLost": {**FAULTS, S.EXITING: R.NOTE},
    "Faulted": FAULTS,
    "Noticed": FAULTS,
    "Answered": _states(R.NOTE, {S.ENDED: R.ABSORB}),
    "Trained": _KEPT,
    "Finished": _KEPT,
    "Checkpointed": _KEPT,
    "StopRequested": _states(R.FORCE, {S.DUMPING: R.NOTE, **_LATE}),
    "PauseRequested": _states(
        R.LATER,
        {S.HEALTHY: R.PAUSE, S.PAUSING: R.ABSORB, S.PAUSED: R.ABSORB, S.DUMPING: R.ABSORB, **_LATE},
    ),
    "ResumeRequested": _states(
        R.ABSORB,
        {
            **dict.fromkeys((S.FREEZING, S.CLEARING, S.CHOOSING, S.AWAITING), R.NOTE),
            **dict.fromkeys((S.REPAIRING, S.REBUILDING, S.ROLLING_BACK, S.RESUMING), R.NOTE),
            S.PAUSING: R.RELEASE,
            S.PAUSED: R.RELEASE,
        },
    ),
    "Advised": _states(R.ABSORB, {S.CHOOSING: R.DECIDE}),
    "Stalled": _states(
        R.ABSORB, {S.HEALTHY: R.SUSPECT, S.PAUSING: R.SUSPECT, S.RESUMING: R.SUSPECT}
    ),
    "DeadlinePassed": _states(R.EXPIRE, {S.ENDED: R.ABSORB}),
    "Led": _states(R.LEAD, {}),
}
"""Kind of event to state to what it leads to. A report is named by its message."""


_MOVING = (S.RESUMING, S.HEALTHY, S.PAUSING)

UNREACHABLE: Mapping[tuple[str, State], str] = {
    **{
        ("Stalled", state): "no rank has to move then, and only while one has to are beats judged"
        for state in State
        if state not in _MOVING
    },
    ("DeadlinePassed", S.ENDED): "nothing is waited for any more, so no deadline is named",
}
"""Kind of event and state to why the one cannot come in the other. Everything else can: what a
process had to say may be heard long after it was given up, when its node can be reached again."""


def kind_of(event: Event) -> str:
    """
    The row of `REACTIONS` an event belongs to.
    """
    match event:
        case Received(message=message):
            return type(message).__name__
        case DeadlinePassed() | Stalled() | Led():
            return type(event).__name__
