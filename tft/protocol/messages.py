"""
Every message of a job. Frozen, validated on arrival, described in `docs/wire.md`.

Reports go from ranks, agents and the launcher to the controller; each is repeated until the
controller has acknowledged it. Orders go from the controller to ranks and agents; each is
repeated until it is answered. Beats and `Lead` are a level, not an event: the newest counts.

Ranks are global ranks, steps are optimizer steps (1-based; 0 is "none yet"), and `at` is
CLOCK_MONOTONIC of the sender's machine in seconds.
"""

from dataclasses import dataclass, field
from typing import Literal

VERSION = 8
"""Raised when a message changes shape; a peer that speaks another one is refused with a sentence."""

FaultKind = Literal[
    "process", "node", "memory", "network", "numeric", "hang", "straggler", "corruption", "software"
]

OrderName = Literal[
    "freeze", "stop", "compare", "load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback", "resume",
    "hold", "check", "release", "save", "commit", "complete", "end",
]  # fmt: skip

Verdict = Literal["pass", "isolate", "end"]
"""What a check says of a rank: go on, take its node out of the job, or end the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """
    Where a rank stands in its loop.
    """

    step: int
    """The last step whose update window has closed; 0 before the first."""
    window: bool
    """True while the update window of step `step` + 1 is open."""
    tail: bool = False
    """True while the loop has not come to the end of step `step`: what stands behind the update window, such as a
    scheduler's step or an evaluation, may be done in part."""
    after: bool = False
    """True while functions that are called after step `step` are still to be called, or run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """
    One piece of state and the ranks that hold a copy of it: a shard group.
    """

    shard: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """
    One file of a last checkpoint, as its saver wrote it.
    """

    name: str
    """Relative to the checkpoint's directory."""
    size: int
    """Bytes."""
    digest: str
    """XXH3-128 of the content, hexadecimal."""


# ---------------------------------------------------------------- reports of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """
    A process has called `tft.init` and claims its rank.
    """

    rank: int
    incarnation: int
    """How many processes held this rank before; given by the agent, so never reused."""
    world: int
    pid: int
    started: int
    """The process start time in clock ticks since boot: with the pid, one process for ever."""
    host: str
    address: str
    """HOST:PORT where this rank serves its shards to others."""
    adaptor: str
    strategies: tuple[str, ...]
    """What the adaptor can take part in."""
    derives: bool = False
    """It can make this rank's private state from a step alone, where what was captured is lost."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """
    The rank has adopted its state and waits in `Session.run` for its first order.
    """

    rank: int
    incarnation: int
    shards: tuple[ShardCopies, ...]
    column: tuple[int, ...] = ()
    """The ranks that can only leave and come back together when the job shrinks or grows; empty:
    this one alone."""
    reloads: bool = False
    """It keeps checkpoints of its own, and finds the newest of them by itself."""
    strategies: tuple[str, ...] = ()
    """What the adaptor can take part in, now that it has the state; empty: what it said before."""
    after: float = 0.0
    """Seconds that the functions which are called after a step may take; 0: there are none."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """
    An exception left the training loop.
    """

    rank: int
    incarnation: int
    kind: FaultKind
    step: int
    """The step being computed."""
    summary: str
    """Exception type and message, one line."""
    traceback: str
    position: Position
    polluted: bool = False
    """The last update may have spread what is wrong: no copy of `position.step` is sound."""
    not_after: int | None = None
    """It is known to be older: no copy of a later step than this is sound."""
    context_lost: bool = False
    """The device takes no more work from this process: only another one can go on."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """
    A rank has carried out an order, or could not.
    """

    rank: int
    incarnation: int
    incident: int
    round: int
    order: OrderName
    failure: str | None = None
    """Why not; None when it was done."""
    context_lost: bool = False
    """As in `Faulted`, where that is why not."""
    position: Position
    held: int | None
    """The step whose whole state this rank has in memory; None while it is torn."""
    backups: tuple[int, ...] = ()
    """Earlier steps of whose whole state this rank keeps a copy."""
    waiting: bool = False
    """For `freeze`: the training thread sits in a collective, or is out of the loop."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """For `compare`, `fetch`, `restore` and `reload`, by shard and part: digests of the state of step `held`. An
    empty one is of a part that is this rank's own. Empty: nothing is held, or it cannot be compared."""
    compared: float = 0.0
    """Seconds that these took."""
    line: str = ""
    """For `stop`: where in the tail of step `held` the loop was left (FILE:LINE)."""
    odd: dict[int, str] = field(default_factory=dict)
    """For `fetch`: the sources that were left out, and why."""
    inexact: tuple[str, ...] = ()
    """What the loop of this rank does in its tails that an incident cannot undo or do again as it was: sentences."""
    tails: bool = False
    """The loop of this rank says where its steps end: behind their windows."""
    files: tuple[SavedFile, ...] = ()
    """For `save`."""
    verdict: Verdict = "pass"
    """For `check`."""
    finding: str = ""
    """For `check`: the sentence behind a verdict that is not `pass`."""
    private: dict[int, str] = field(default_factory=dict)
    """For a `save` that failed: the private state it captured last (hexadecimal), by step. Without this
    rank's copies it may be another step that is saved."""
    began: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """
    The first step after a resume is done: its update window has closed on this rank.
    """

    rank: int
    incarnation: int
    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """
    `train` has returned; the rank waits for the others and can still give its state away.
    """

    rank: int
    incarnation: int
    step: int
    """The last step done."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """
    A periodic checkpoint of the whole job is complete: what is left when no copy is.
    """

    rank: int
    incarnation: int
    directory: str
    step: int
    """The step whose end it holds."""
    compared: bool = False
    """All copies of what it holds were equal then."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """
    A rank could not do its part for a periodic checkpoint, or the copies of it differ: there is none of that step.
    """

    rank: int
    incarnation: int
    step: int
    """The step whose end it was to hold."""
    why: str
    differ: bool = False
    """The copies that ranks hold are not equal: that is a fault. Otherwise training goes on."""
    wrong: tuple[int, ...] = ()
    """The ranks whose copies are wrong; empty: nobody can say."""
    at: float


# ---------------------------------------------------------------- reports of agents and the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """
    An agent is up and will start these ranks.
    """

    node: int
    host: str
    pid: int
    ranks: tuple[int, ...]
    spare: int = 0
    """For how many more ranks it has room: those of a node that is lost."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """
    An agent has started the process of a rank.
    """

    node: int
    rank: int
    incarnation: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """
    The process of a rank is gone: the kernel says so.
    """

    node: int
    rank: int
    incarnation: int
    code: int
    """Exit status, or minus the signal that ended it."""
    position: Position
    """Read from the page the process left behind."""
    stack: str
    """The stacks it wrote when it was asked for its last words; else empty."""
    stopped: bool = False
    """The process was found stopped (SIGSTOP) when it was ended."""
    private: dict[int, str]
    """The private state it captured last (RNG, data position; hexadecimal), by step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """
    The rendezvous store accepts connections here, from now on.
    """

    node: int
    host: str
    port: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """
    The launcher has seen an agent end, or the controller has not heard from it for too long.
    """

    node: int
    pid: int = 0
    """The agent that is meant; 0: whoever is there."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """
    Somebody asks for the job to end, after a last checkpoint if one is possible.
    """

    why: str
    signal: int
    """The signal that asked; 0 for none."""
    node: int | None = None
    """The node whose launcher was asked, where nothing but its own ranks ends with it: where these are to
    go elsewhere, or have gone, the job goes on."""
    at: float


# ---------------------------------------------------------------- reports of people and plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """
    Somebody asks for the job to stand still at a step boundary, its groups kept.
    """

    why: str
    check: str
    """The check to be run while it stands, after which it goes on by itself; empty: none, and it
    goes on when it is asked to."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """
    Somebody asks for a paused job to go on.
    """

    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequested:
    """
    Somebody asks for these ranks to go to other processes, together, and trains on meanwhile: on nodes with
    room, as soon as there are any. Whoever was asked for before, and is not named again, keeps its process.
    """

    ranks: tuple[int, ...]
    """None: what was asked for is called off."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """
    A fault of a rank was seen from outside of it: by an observer, a scheduler, an operator.
    """

    rank: int
    kind: FaultKind
    evidence: str
    polluted: bool = False
    """As in `Faulted`."""
    not_after: int | None = None
    """As in `Faulted`."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """
    What a recovery plugin says to the strategies it was offered.
    """

    incident: int
    round: int
    """Of the offer that is answered; advice to an older one is absorbed."""
    strategy: str = ""
    """The one to follow: one that was offered, or a name of the plugin's own for `base`; empty:
    the default."""
    base: str = ""
    """For a name of its own: the strategy it is a variant of."""
    not_after: int | None = None
    """For a name of its own: go back to this step or an earlier one."""
    skip: int = 0
    """For a name of its own: how many batches to leave out."""
    replace: tuple[int, ...] = ()
    """For a name of its own: ranks whose processes are replaced too."""
    veto: tuple[str, ...] = ()
    """Strategies not to be followed in this incident."""
    wait: float = 0.0
    """Seconds to wait for further advice before anything is chosen."""
    why: str
    at: float


# ---------------------------------------------------------------- levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """
    One rank as its agent sees it, read from its page.
    """

    rank: int
    incarnation: int
    position: Position
    training: bool
    """The rank is inside `train`: no progress is news."""
    moved: float
    """When the training thread last moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """
    The status of a node's ranks, a few times a second.
    """

    node: int
    pulses: tuple[Pulse, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """
    The controller leads in this epoch, and has heard these parties up to these numbers.
    """

    epoch: int
    heard: dict[str, int]
    """Sender (`rank.3/1`, `node.0/0`) to the highest report number acted on."""
    state: str = ""
    """What the job as a whole is doing: a state of `docs/machine.md`."""
    incident: int = 0
    """The number of the newest incident; 0 before the first."""
    check: str = ""
    """What became of the last check that was asked for: `passed`, or a sentence; empty: nothing
    yet."""


# ---------------------------------------------------------------- orders to ranks
#
# All of them carry `epoch`, `incident` and `round`, to be known when they are late; `to`, the ranks
# that are meant; and `incarnations`, the incarnation that holds a rank where it is not the
# first (0). A process that does not hold the rank (one that was given up but lives on, one that
# will take over later) obeys nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """
    Enter no update window from now on; say where you stand. Answered by the control thread at once.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """
    Finish step `finish` with its tail if you have not (within `grace`), go no further, leave the loop,
    abort what you hang in and drop the process groups.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    finish: int
    grace: float
    """Seconds to reach `finish` before the collective is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """
    Say digests of what you hold, to be compared with those of the others that hold the same.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Take the state of this checkpoint.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    directory: str
    step: int
    """The step whose end the checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """
    A verified holder of a shard at the agreed step.
    """

    rank: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """
    One shard to be fetched, and everyone it can be fetched from.
    """

    shard: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """
    Copy these shards as they were at the end of `step`; verify what came.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """
    Take back the copy you keep of the end of `step`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """
    Form the process groups anew under `name`, at the store at `host`:`port`. All ranks at once.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    """The first step that will be computed in them; 0: the ranks find that out (`Reload`)."""
    name: str
    host: str
    port: int
    without: tuple[int, ...] = ()
    """The ranks of the world that have no part in the groups: the job has shrunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """
    Find the newest checkpoint that you keep yourself, and load it; the groups are formed. All ranks
    at once. What the answer says to be held is the step whose end it is of.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    not_after: int | None = None
    """What is later than this step may be wrong; None: there is no such limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """
    Build the wrappers anew round the state you now hold. All ranks at once.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """
    Set your own RNG and data position to the end of `step`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    skip: int = 0
    """How many batches to draw after that, and drop."""
    private: dict[int, str] = field(default_factory=dict)
    """By rank: what a lost process had captured (hexadecimal), for one that may not find it."""
    derive: tuple[int, ...] = ()
    """The ranks that have been away, or whose captures are lost: theirs is made from the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """
    Enter the loop; `step` is the first to be computed.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    again: bool = False
    """First call the functions that are called after step `step` - 1: some rank has not been through them."""
    tails: bool = False
    """Loops say where their steps end, as some rank has said: with the first step, too, no step ends with its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """
    Go on to the end of `step` and no further; answered when you stand there, with your all-reduces of
    the next step complete and your groups kept.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """
    Run this check while you stand still, and say what it found.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """
    Go on from where you stand.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """
    Write these shards, and the private state of the ranks in `private`, under `directory`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    directory: str
    step: int
    shards: tuple[str, ...]
    copies: tuple[str, ...] = ()
    """Shards that another rank writes, and this one once more: it does not matter if it cannot."""
    private: dict[int, str]
    """Private state of ranks that cannot write their own (hexadecimal), by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """
    Every saver is done: write the manifest, sync, rename into place.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    directory: str
    step: int
    files: tuple[SavedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """
    Every rank has finished: return from `Session.run`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """
    The job is over: leave `Session.run` with `code`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    code: int
    why: str


# ---------------------------------------------------------------- orders to agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """
    Start the process of a rank. Answered by `Spawned`.
    """

    epoch: int
    node: int
    rank: int
    incarnation: int
    cause: str
    successor: bool = False
    """It is to take over from one that still trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """
    End the process of a rank, at once. Answered by `Exited`.
    """

    epoch: int
    node: int
    rank: int
    incarnation: int
    last_words: bool
    """Have it write its stacks first."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNode:
    """
    The job is over: give the ranks `grace` seconds to leave, end what is left, end yourself.
    """

    epoch: int
    grace: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """
    To one sender: what it claims is not accepted, and it must leave.
    """

    epoch: int
    rank: int
    pid: int
    started: int
    why: str


RankReport = (
    Joined | Ready | Faulted | Answered | Trained | Finished | Checkpointed | CheckpointFailed
)
NodeReport = NodeJoined | Spawned | Exited | StoreOpened
OutsideReport = (
    NodeLost
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | SwitchRequested
    | Noticed
    | Advised
)
Report = RankReport | NodeReport | OutsideReport
RankOrder = (
    Freeze | Stop | Compare | Load | Fetch | Restore | Regroup | Reload | Rebuild | Rollback | Resume
    | Hold | Check | Release | Save | Commit | Complete | End
)  # fmt: skip
NodeOrder = Spawn | Kill | EndNode
Order = RankOrder | NodeOrder | Refused
Message = Report | Order | Beat | Lead

MESSAGES: tuple[type, ...] = (
    Joined, Ready, Faulted, Answered, Trained, Finished, Checkpointed, CheckpointFailed,
    NodeJoined, Spawned, Exited, StoreOpened, NodeLost, StopRequested,
    PauseRequested, ResumeRequested, SwitchRequested, Noticed, Advised,
    Beat, Lead,
    Freeze, Stop, Compare, Load, Fetch, Restore, Regroup, Reload, Rebuild, Rollback, Resume, Hold, Check,
    Release, Save, Commit, Complete, End,
    Spawn, Kill, EndNode, Refused,
)  # fmt: skip
"""All of them, in the order of `docs/wire.md`. The class name is the name on the wire."""

ORDER_NAMES: dict[type[RankOrder], OrderName] = {
    Freeze: "freeze", Stop: "stop", Compare: "compare", Load: "load", Fetch: "fetch", Restore: "restore",
    Regroup: "regroup", Reload: "reload", Rebuild: "rebuild", Rollback: "rollback",
    Resume: "resume", Hold: "hold", Check: "check", Release: "release", Save: "save", Commit: "commit", Complete: "complete",
    End: "end",
}  # fmt: skip
"""What an answer calls the order it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """
    A message with its sender. `number` counts a sender's reports from 1; 0 marks what is not
    acknowledged (orders, beats, `Lead`).
    """

    job: str
    sender: str
    """`rank.3/1` (rank and incarnation), `node.0/0`, `run`, `controller/2` (epoch)."""
    number: int
    message: Message
