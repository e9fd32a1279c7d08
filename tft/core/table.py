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


_MOVING = (S.RESUMING, S.HEALTHY, S.PAUSING)
_LATE = {S.EXITING: R.ABSORB, S.ENDED: R.ABSORB}
_KEPT = {**dict.fromkeys(State, R.NOTE), **_LATE}
_HEARD = {**dict.fromkeys(State, R.NOTE), S.ENDED: R.ABSORB}
FAULTS = {
    **dict.fromkeys(State, R.FREEZE),
    **dict.fromkeys((S.FREEZING, S.CLEARING), R.JOIN),
    **dict.fromkeys((S.CHOOSING, S.AWAITING, S.DUMPING), R.REPLAN),
    **_LATE,
}
"""What a fault leads to, however it became known."""

REACTIONS: Mapping[str, Mapping[State, Reaction]] = {
    "NodeJoined": _HEARD,
    "Spawned": _KEPT,
    "StoreOpened": {**_KEPT, S.REPAIRING: R.FREEZE},
    "Joined": dict.fromkeys(State, R.NOTE),
    "Ready": _HEARD,
    "Exited": {**FAULTS, S.EXITING: R.NOTE, S.ENDED: R.NOTE},
    "NodeLost": {**FAULTS, S.EXITING: R.NOTE},
    "Faulted": FAULTS,
    "Noticed": FAULTS,
    "Answered": _HEARD,
    "Trained": _KEPT,
    "Finished": _KEPT,
    "Checkpointed": _KEPT,
    "CheckpointFailed": _KEPT,
    "StopRequested": {**dict.fromkeys(State, R.FORCE), S.DUMPING: R.NOTE, **_LATE},
    "PauseRequested": {
        **dict.fromkeys(State, R.LATER),
        S.HEALTHY: R.PAUSE,
        **dict.fromkeys((S.PAUSED, S.DUMPING), R.ABSORB),
        **_LATE,
    },
    "ResumeRequested": {
        **dict.fromkeys(State, R.NOTE),
        **dict.fromkeys((S.PAUSING, S.PAUSED), R.RELEASE),
        **dict.fromkeys((S.HEALTHY, S.DUMPING), R.ABSORB),
        **_LATE,
    },
    "SwitchRequested": _KEPT,
    "Advised": {**dict.fromkeys(State, R.ABSORB), S.CHOOSING: R.DECIDE},
    "Stalled": {**dict.fromkeys(State, R.ABSORB), **dict.fromkeys(_MOVING, R.SUSPECT)},
    "DeadlinePassed": {**dict.fromkeys(State, R.EXPIRE), S.ENDED: R.ABSORB},
    "Led": dict.fromkeys(State, R.LEAD),
}
"""Kind of event to state to what it leads to. A report is named by its message."""

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
