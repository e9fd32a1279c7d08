"""
The two tables of the job machine. `TRANSITIONS` lists the states that may follow each state; any
other move is a bug of tft. `REACTIONS` lists the reaction to each event in each state; the machine
looks up every event here. `docs/reference/machine.md` shows both tables.
"""

from collections.abc import Mapping
from enum import StrEnum

from tft.core.job.events import Event, Received


class State(StrEnum):
    """
    The states of the job as a whole.
    """

    AWAITING = "awaiting"
    """Processes are starting. The other ranks wait for them outside their loops."""
    REPAIRING = "repairing"
    """Lost state is being copied, and process groups are being formed."""
    REBUILDING = "rebuilding"
    """Wrappers are being built around the repaired state."""
    ROLLING_BACK = "rolling back"
    """RNG and data positions are being set to the step that all members return to."""
    RESUMING = "resuming"
    """The ranks train again. When every member has trained one step, the incident is closed."""
    HEALTHY = "healthy"
    PAUSING = "pausing"
    """All ranks continue to the same step boundary, to wait there."""
    PAUSED = "paused"
    """All ranks wait at the same step boundary. A check of links and devices may run there."""
    CONFIRMING = "confirming"
    """All ranks have finished, and their copies are compared before the job is complete."""
    FREEZING = "freezing"
    """Every rank is asked for its position, and begins no further update."""
    CLEARING = "clearing"
    """The training threads leave the loop and drop the broken process groups."""
    CHOOSING = "choosing"
    """Recovery plugins are asked which strategy to follow. Without plugins this takes no time."""
    DUMPING = "dumping"
    """The survivors write a last checkpoint."""
    EXITING = "exiting"
    """The ranks are leaving."""
    ENDED = "ended"
    """No process is left."""


S = State
TRANSITIONS: Mapping[State, frozenset[State]] = {
    S.AWAITING: frozenset({S.CHOOSING, S.REPAIRING, S.FREEZING, S.EXITING}),
    S.REPAIRING: frozenset({S.REBUILDING, S.FREEZING, S.EXITING}),
    S.REBUILDING: frozenset({S.ROLLING_BACK, S.FREEZING, S.EXITING}),
    S.ROLLING_BACK: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.RESUMING: frozenset({S.HEALTHY, S.FREEZING, S.EXITING}),
    S.HEALTHY: frozenset({S.PAUSING, S.CONFIRMING, S.FREEZING, S.EXITING}),
    S.CONFIRMING: frozenset({S.FREEZING, S.EXITING}),
    S.PAUSING: frozenset({S.PAUSED, S.RESUMING, S.FREEZING, S.EXITING}),
    S.PAUSED: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.FREEZING: frozenset({S.CLEARING, S.FREEZING, S.EXITING}),
    S.CLEARING: frozenset({S.CHOOSING, S.FREEZING, S.EXITING}),
    S.CHOOSING: frozenset({S.CHOOSING, S.AWAITING, S.DUMPING, S.FREEZING, S.EXITING}),
    S.DUMPING: frozenset({S.DUMPING, S.EXITING}),
    S.EXITING: frozenset({S.ENDED}),
    S.ENDED: frozenset(),
}
"""The states that may follow each state. In every state in which a rank is in the loop or forms a
process group, a fault leads to FREEZING. A new controller that could not read all recorded events
also goes to FREEZING, from almost every state, because it does not know what the ranks do."""

SETTLED = frozenset({S.EXITING, S.ENDED})
"""The states in which the outcome of the job is decided."""

CALM = frozenset({S.HEALTHY, S.CONFIRMING})
"""The states in which no incident and no pause is under way."""


class Reaction(StrEnum):
    """
    What the machine does about an event, in addition to recording it.
    """

    TAKE = "takes"
    """The event is recorded, or the request in it is carried out. If the job waited only for this
    event, the job moves on."""
    FREEZE = "freezes"
    """The event is a fault: it opens an incident, or joins the open one, and a new round begins."""
    JOIN = "joins"
    """The event is a fault: it joins the open incident. The freeze or the stop of the ranks that is
    under way continues."""
    REPLAN = "replans"
    """The event is a fault: it joins the open incident, and the strategy is chosen again."""
    FORCE = "ends"
    """The event asks for the end of the job: the ranks are stopped and save a last checkpoint."""
    PAUSE = "pauses"
    """All ranks are brought to one step boundary, to wait there."""
    LATER = "keeps"
    """The request is kept, and carried out when the job is healthy."""
    RELEASE = "releases"
    """All ranks continue to train from the step boundary at which they wait."""
    ABSORB = "absorbs"
    """The event comes too late or has no meaning in this state: nothing is done about it."""


R = Reaction


_MOVING = (S.RESUMING, S.HEALTHY, S.PAUSING)
_LATE = {S.EXITING: R.ABSORB, S.ENDED: R.ABSORB}
_KEPT = {**dict.fromkeys(State, R.TAKE), **_LATE}
_HEARD = {**dict.fromkeys(State, R.TAKE), S.ENDED: R.ABSORB}
FAULTS = {
    **dict.fromkeys(State, R.FREEZE),
    **dict.fromkeys((S.FREEZING, S.CLEARING), R.JOIN),
    **dict.fromkeys((S.CHOOSING, S.AWAITING, S.DUMPING), R.REPLAN),
    **_LATE,
}
"""The reaction to a fault in each state. The reaction is the same for every way in which a fault is
found: a report, a late answer to an order, or a comparison of copies."""

REACTIONS: Mapping[str, Mapping[State, Reaction]] = {
    "NodeJoined": _HEARD,
    "Spawned": _KEPT,
    "StoreOpened": _KEPT,
    "Joined": dict.fromkeys(State, R.TAKE),
    "Ready": _HEARD,
    "Recalled": _KEPT,
    "Exited": {**FAULTS, S.EXITING: R.TAKE, S.ENDED: R.TAKE},
    "NodeLost": {**FAULTS, S.EXITING: R.TAKE},
    "Faulted": FAULTS,
    "Noticed": FAULTS,
    "Answered": _HEARD,
    "Trained": _KEPT,
    "Finished": _KEPT,
    "Checkpointed": _KEPT,
    "CheckpointFailed": _KEPT,
    "StopRequested": {**dict.fromkeys(State, R.FORCE), S.DUMPING: R.TAKE, **_LATE},
    "PauseRequested": {
        **dict.fromkeys(State, R.LATER),
        S.HEALTHY: R.PAUSE,
        **dict.fromkeys((S.PAUSED, S.DUMPING), R.ABSORB),
        **_LATE,
    },
    "ResumeRequested": {
        **dict.fromkeys(State, R.TAKE),
        **dict.fromkeys((S.PAUSING, S.PAUSED), R.RELEASE),
        **dict.fromkeys((S.HEALTHY, S.DUMPING), R.ABSORB),
        **_LATE,
    },
    "SwitchRequested": _KEPT,
    "Advised": {**dict.fromkeys(State, R.ABSORB), S.CHOOSING: R.TAKE},
    "Stalled": {**dict.fromkeys(State, R.ABSORB), **dict.fromkeys(_MOVING, R.TAKE)},
    "SlicesAgreed": {**dict.fromkeys(State, R.ABSORB), **dict.fromkeys(CALM, R.TAKE)},
    "SlicesDiffered": FAULTS,
    "CorruptionTraced": {**dict.fromkeys(State, R.ABSORB), **dict.fromkeys(CALM, R.TAKE)},
    "DeadlinePassed": _HEARD,
    "Led": dict.fromkeys(State, R.TAKE),
}
"""The reaction to each kind of event in each state. The kind of an event is the name of its class;
for a received report, the name of the class of its message."""

UNREACHABLE: Mapping[tuple[str, State], str] = {
    **{
        ("Stalled", state): "no rank has to move then, and only while one has to are beats judged"
        for state in State
        if state not in _MOVING
    },
    **{("SlicesDiffered", state): "the outcome is decided" for state in (S.EXITING, S.ENDED)},
    **{
        (kind, state): "it waits until the job is healthy"
        for kind in ("SlicesAgreed", "CorruptionTraced")
        for state in State
        if state not in CALM
    },
    ("DeadlinePassed", S.ENDED): "nothing is waited for any more, so no deadline is named",
}
"""The pairs of an event kind and a state that cannot occur, each with the reason. All other pairs
are possible: a report of a process may arrive long after tft has given the process up, when its
node can be reached again."""


def kind_of(event: Event) -> str:
    """
    Return the kind of an event: the key of its row in `REACTIONS`.
    """
    return type(event.message if isinstance(event, Received) else event).__name__
