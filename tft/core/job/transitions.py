"""
The two tables of the job machine, the state machine of the controller. `TRANSITIONS` lists which
states of the job may follow each state; any other move is a bug of tft. `REACTIONS` lists what the
machine does about each event in each state. `docs/reference/machine.md` shows both tables.
"""

from collections.abc import Mapping
from enum import StrEnum

from tft.core.job.events import Event, Received


class State(StrEnum):
    """
    The states of the job as a whole.
    """

    AWAITING = "awaiting"
    """The job waits until every rank that takes part has a process that can carry out orders. Ranks
    that have such a process wait outside their training loops."""
    REPAIRING = "repairing"
    """Ranks that lack training state fetch, load or restore it, and the ranks form process groups.
    """
    REBUILDING = "rebuilding"
    """The ranks build their wrappers, such as DDP, around the repaired models."""
    ROLLING_BACK = "rolling back"
    """The ranks set their generators (RNG) and data positions to the step that all ranks return
    to."""
    RESUMING = "resuming"
    """The ranks train again. When every rank that takes part has trained one step, the incident or
    the pause is over."""
    HEALTHY = "healthy"
    PAUSING = "pausing"
    """All ranks train on to the same step boundary, to wait there for a pause or a takeover."""
    PAUSED = "paused"
    """All ranks wait at the same step boundary. A check of links and devices may run there."""
    CONFIRMING = "confirming"
    """All ranks have finished training. Their copies of shards are compared before the job is
    completed."""
    FREEZING = "freezing"
    """Every rank is asked for its position in the training loop, and begins no further update."""
    CLEARING = "clearing"
    """The training threads of the ranks leave their loops and drop the process groups. Then the
    copies of shards are compared."""
    CHOOSING = "choosing"
    """Recovery plugins are asked which recovery strategy to follow. Without plugins the job leaves
    this state at once."""
    DUMPING = "dumping"
    """The remaining ranks write a last checkpoint, after which the job ends."""
    EXITING = "exiting"
    """The outcome of the job is decided, and the ranks are leaving."""
    ENDED = "ended"
    """The job is over. The agents are ordered to end any process that still runs."""


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
"""The states of the job that may follow each state. From most states, a fault leads to FREEZING;
`FAULTS` has the exceptions. A new controller that could not read all recorded events also goes to
FREEZING, from almost every state, because it does not know what the ranks are doing."""

SETTLED = frozenset({S.EXITING, S.ENDED})
"""The states of the job in which the outcome of the job is already decided."""

CALM = frozenset({S.HEALTHY, S.CONFIRMING})
"""The states in which no incident and no pause is under way."""


class Reaction(StrEnum):
    """
    What the job machine does about an event.
    """

    TAKE = "takes"
    """The machine records the event, or carries out the request in it. If the job has waited only
    for this event, the job goes on to its next state."""
    FREEZE = "freezes"
    """The event is a fault. The fault opens an incident or is added to the open incident, and a new
    round begins."""
    JOIN = "joins"
    """The event is a fault. The fault is added to the open incident. The ranks are being stopped
    already, so no new round begins."""
    REPLAN = "replans"
    """The event is a fault. The fault is added to the incident, and the recovery strategy is chosen
    again."""
    FORCE = "ends"
    """The event is a request to end the job. The ranks are stopped and save a last checkpoint."""
    PAUSE = "pauses"
    """The event is a request for a pause. All ranks train on to one step boundary and wait
    there."""
    LATER = "keeps"
    """The event is a request for a pause. The request is kept, and carried out when the job is
    healthy."""
    RELEASE = "releases"
    """The event is a request to end a pause. All ranks train on from the step boundary at which
    they wait."""
    ABSORB = "absorbs"
    """The event comes too late or has no meaning in this state, so nothing is done about it."""


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
"""What the job machine does about a fault in each state of the job. It does not matter how the
fault was found: by a report, a late answer to an order, or a comparison of copies."""

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
    "Noticed": {**FAULTS, S.EXITING: R.TAKE},
    "Answered": _HEARD,
    "Trained": _KEPT,
    "Finished": _KEPT,
    "Checkpointed": _KEPT,
    "CheckpointFailed": _KEPT,
    "StopRequested": {
        **dict.fromkeys(State, R.FORCE),
        **dict.fromkeys((S.DUMPING, S.EXITING), R.TAKE),
        S.ENDED: R.ABSORB,
    },
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
"""What the job machine does about each kind of event in each state of the job. The kind of an event
is the name of the event's class. For a received report, the kind is the name of the report's class.
"""

UNREACHABLE: Mapping[tuple[str, State], str] = {
    **{
        ("Stalled", state): "no rank must make progress then, so no stall is looked for"
        for state in State
        if state not in _MOVING
    },
    **{("SlicesDiffered", state): "the outcome is decided" for state in (S.EXITING, S.ENDED)},
    **{
        (kind, state): "the verdict waits until the job is healthy"
        for kind in ("SlicesAgreed", "CorruptionTraced")
        for state in State
        if state not in CALM
    },
    ("DeadlinePassed", S.ENDED): "the job waits for nothing any more, so it has no deadline",
}
"""Which kinds of events cannot occur in which states of the job, each with the reason. Everything
that is not listed can occur. Even a report of a process that tft has given up may arrive in any
state: it is delivered when the node of that process can be reached again."""


def kind_of(event: Event) -> str:
    """
    Return the kind of an event, which is the key of its row in the table `REACTIONS`: the name of
    the class of the event or, for a received report, of the report.
    """
    return type(event.message if isinstance(event, Received) else event).__name__
