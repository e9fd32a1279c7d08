"""
All messages between the processes of a job. `docs/reference/wire.md` describes each field.

A message cannot be changed after its creation, and is validated when it is received. There are
three groups of messages.

Reports go from ranks, agents, the launcher and commands of `tft` to the controller. The sender
repeats a report until the controller has acknowledged the report.

Orders go from the controller to ranks and agents. The controller repeats an order until the order
is answered.

`Beat` and `Lead` describe a current status and are sent repeatedly. Only the newest `Beat` or
`Lead` of a sender matters. The same holds for `LocalStates` and `LocalStatesKept`, which agents
send to each other.

Ranks are global ranks. Steps are optimizer steps, counted from 1; step 0 means that no step has
been done. `at` is the time CLOCK_MONOTONIC of the sender's machine in seconds.
"""

from dataclasses import dataclass, field
from typing import Literal

VERSION = 12
"""The version of the protocol. It is increased when a message changes its form. A peer with another
version is refused with an error message."""

FaultKind = Literal[
    "process", "node", "memory", "network", "numeric", "hang", "straggler", "corruption", "software"
]

OrderName = Literal[
    "freeze", "stop", "compare", "load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback", "resume",
    "hold", "check", "release", "save", "commit", "complete", "end",
]  # fmt: skip

Verdict = Literal["pass", "isolate", "end"]
"""The result of a check of a rank: go on, take the rank's node out of the job, or end the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """
    How far a rank has got in its training loop: its step, and the part of the step.
    """

    step: int
    """The last step whose update window has closed; 0 before the first."""
    window: bool
    """True while the update window of step `step` + 1 is open."""
    tail: bool = False
    """True while the loop has not reached the end of step `step`. A part of what follows the update
    window, such as a scheduler's step or an evaluation, may be done already."""
    after: bool = False
    """True while functions that tft calls after step `step` (`session.evaluate`,
    `session.after_step`) are running or are still to be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """
    A shard (one piece of training state), and all ranks that hold a copy of the shard.

    These ranks are the shard group of the shard.
    """

    shard: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """
    One file of a last checkpoint, as the rank that saved the file has written it.
    """

    name: str
    """The file's name, relative to the checkpoint's directory."""
    size: int
    """The size in bytes."""
    digest: str
    """The XXH3-128 of the content, hexadecimal."""


# ---------------------------------------------------------------- reports of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """
    Report of a rank: the process has called `tft.init` and claims a rank of the job.
    """

    rank: int
    incarnation: int
    """How many processes held this rank before. The agent gives the number, so it is never
    reused."""
    world: int
    pid: int
    started: int
    """The process start time in clock ticks since boot. With the pid it identifies one process."""
    host: str
    address: str
    """HOST:PORT where this rank serves its shards to other ranks."""
    adaptor: str
    strategies: tuple[str, ...]
    """The strategies that the adaptor supports."""
    derives: bool = False
    """True if the adaptor can compute the rank-local state of this rank from a step number. This is
    needed when the captured state is lost."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """
    Report of a rank: the rank has taken over the user's training state (`session.adopt`).

    The rank now waits in `Session.run` for its first order.
    """

    rank: int
    incarnation: int
    shards: tuple[ShardCopies, ...]
    column: tuple[int, ...] = ()
    """The ranks of the model replica of this rank, which can leave and come back only together when
    the job shrinks or grows. Empty: only this rank."""
    reloads: bool = False
    """True if the program writes checkpoints without tft, and finds the newest of them by itself.
    """
    strategies: tuple[str, ...] = ()
    """The strategies that the adaptor supports, now that it has the state. Empty: those in
    `Joined`."""
    after: float = 0.0
    """The time in seconds that the functions which tft calls after a step may take. 0: there are no
    such functions."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """
    What a rank has computed in one step: digests, by which two attempts of the step are compared.
    """

    own: str
    """Digest of the losses and of the gradients that the rank has computed alone."""
    common: str
    """Digest of the norm of the reduced gradients."""
    batches: int = 1
    """How many batches the step has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """
    Report of a rank: an exception has left the training loop.
    """

    rank: int
    incarnation: int
    kind: FaultKind
    step: int
    """The step being computed."""
    summary: str
    """The exception's type and message, in one line."""
    traceback: str
    position: Position
    polluted: bool = False
    """True if the last update may have spread the error: no copy of the state of `position.step` is
    sound."""
    not_after: int | None = None
    """The last step whose copies can be sound, if the error is known to be older than the step in
    which it was noticed. None: the age of the error is not known."""
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that only another process can
    continue."""
    refused: StepNumbers | None = None
    """What the rank had computed when it refused the update of `step` because of wrong numbers. Its
    state was not changed. None: the fault is not a refused update."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """
    Report of a rank: the rank has carried out an order, or has failed to carry it out.
    """

    rank: int
    incarnation: int
    incident: int
    round: int
    order: OrderName
    failure: str | None = None
    """Why the order could not be carried out; None: it was carried out."""
    context_lost: bool = False
    """True if the order failed because the device accepts no more work from this process."""
    position: Position
    held: int | None
    """The step of the complete state that this rank has in memory. None: the state is incomplete.
    """
    backups: tuple[int, ...] = ()
    """The earlier steps of which this rank keeps a copy of the complete state."""
    waiting: bool = False
    """For `freeze`: True if the training thread waits in a collective, or is out of the loop."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """For `compare`, `fetch`, `restore` and `reload`: digests of the state of step `held`, by shard
    and part. An empty digest means that this part differs from rank to rank by design. An empty
    mapping means that the rank has no state, or that the state cannot be compared."""
    compared: float = 0.0
    """The time in seconds that it took to compute the digests."""
    line: str = ""
    """For `stop`: the place in the tail of step `held` where the loop was left (FILE:LINE)."""
    odd: dict[int, str] = field(default_factory=dict)
    """For `fetch`: the source ranks that this rank did not use, each with the reason."""
    inexact: tuple[str, ...] = ()
    """Sentences for the operator. They name what the loop of this rank does in its tails that an
    incident cannot undo or repeat exactly."""
    tails: bool = False
    """True if the loop of this rank marks the end of each step, which is later than the end of the
    update window."""
    files: tuple[SavedFile, ...] = ()
    """For `save`: the files that were written."""
    verdict: Verdict = "pass"
    """For `check`: the result."""
    finding: str = ""
    """For `check`: the reason for a verdict other than `pass`, as a sentence."""
    local_state: dict[int, str] = field(default_factory=dict)
    """For a `save` that failed: the last captures of this rank's rank-local state (hexadecimal), by
    step. Another rank writes the state for this rank, possibly of another step."""
    began: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """
    Report of a rank: the rank has completed the first step after a `Resume` order.

    The step counts as complete because its update window has closed on this rank.
    """

    rank: int
    incarnation: int
    step: int
    numbers: StepNumbers | None = None
    """What the rank has computed in this step. None: no plugin watches the numbers of steps."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """
    Report of a rank: the user's function `train` has returned.

    The rank waits for the other ranks. Other ranks can still fetch the state of this rank.
    """

    rank: int
    incarnation: int
    step: int
    """The last step that was done."""
    sliced: bool = False
    """True if copies were compared slice by slice while the job trained (`--integrity`). All copies
    are then compared as a whole before the job is complete."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """
    Report of a rank: a periodic checkpoint of the whole job is complete.

    The job returns to this checkpoint if all copies of some part of the state are lost.
    """

    rank: int
    incarnation: int
    directory: str
    step: int
    """The step whose end state the checkpoint holds."""
    compared: bool = False
    """True if all copies of the checkpoint's state were found equal at that step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """
    Report of a rank: the periodic checkpoint of a step has failed.

    The rank could not do its part of the checkpoint, or the ranks hold differing copies of its
    state. No checkpoint of that step exists.
    """

    rank: int
    incarnation: int
    step: int
    """The step whose end state the checkpoint would have held."""
    why: str
    differ: bool = False
    """True if the copies that ranks hold are not equal, which is a fault. False: the checkpoint
    failed for another reason, and training continues."""
    wrong: tuple[int, ...] = ()
    """The ranks whose copies are wrong. Empty: not known."""
    unsliced: bool = False
    """True if a part differs that slices do not contain, such as a module buffer."""
    at: float


# --------------------------------------------------------------- reports of agents and the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """
    Report of an agent: the agent of a node is ready to start the processes of `ranks`.
    """

    node: int
    host: str
    pid: int
    ranks: tuple[int, ...]
    spare: int = 0
    """The number of further ranks for which the node has room, to replace ranks of a lost node."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """
    Report of an agent: the agent has started the process of a rank.
    """

    node: int
    rank: int
    incarnation: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """
    Report of an agent: the kernel has reported the end of a rank's process.
    """

    node: int
    rank: int
    incarnation: int
    code: int
    """The exit status, or the negative number of the signal that ended the process."""
    position: Position
    """The last position, read from the shared memory that the process left behind."""
    stack: str
    """The stacks of all threads, if the process was asked to write them. Empty: the process was not
    asked, or did not answer."""
    stopped: bool = False
    """True if the process was in the stopped state (SIGSTOP) when it was ended."""
    script_ended: bool = False
    """True if the script and its exit handlers (`atexit`) had ended without an error before the
    process ended."""
    local_state: dict[int, str]
    """The rank-local state that the process captured last (generators, data position; hexadecimal),
    by step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """
    Report of an agent: the rendezvous store accepts connections at `host`:`port` from now on.

    Ranks use this store to form process groups.
    """

    node: int
    host: str
    port: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """
    Report of an agent: the rank-local state of a rank of a lost node, which this node has kept.
    """

    node: int
    """The node that reports."""
    lost: int
    """The node that was lost."""
    rank: int
    incarnation: int
    """The incarnation that had captured the state last. -1: this node has kept no state of the
    rank."""
    incident: int
    """`incident` and `round` identify the last rollback of the rank before the captures. If a later
    rollback gave up some of the captured steps, their captures do not count."""
    round: int
    local_state: dict[int, str]
    """The rank-local state (hexadecimal), by step."""
    early: tuple[int, ...] = ()
    """The steps of `local_state` whose capture may not be final: it was made before the end of the
    step, and captures of this rank were seen to change until the end of a step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """
    Report: the agent of a node has ended or is silent.

    Either the launcher has seen the agent's process end, or the controller has not heard from the
    agent for too long.
    """

    node: int
    pid: int = 0
    """The pid of the agent that ended. 0: the present agent of the node."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """
    Report: a person or program asks for the end of the job.

    If possible, the job saves a last checkpoint first.
    """

    why: str
    signal: int
    """The signal that was received; 0: none."""
    node: int | None = None
    """The node whose launcher was asked to end. The job continues if the ranks of this node have
    moved to other nodes, or are to move. None: the whole job is to end."""
    at: float


# ---------------------------------------------------------------- reports of people and plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """
    Report: a person or program asks the job to pause at the boundary between two steps.

    The process groups are kept during the pause.
    """

    why: str
    check: str
    """The check to run during the pause; the job continues by itself afterwards. Empty: there is no
    check, and the job continues when it is asked to."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """
    Report: a person or program asks a paused job to continue.
    """

    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequested:
    """
    Report: a person or program asks to move these ranks to other processes while training goes on.

    All named ranks move at the same time, to nodes that have room, as soon as enough room is free.
    A new request replaces an earlier one: a rank that only the earlier request names is not moved.
    """

    ranks: tuple[int, ...]
    """The ranks to move. Empty: cancel an earlier request."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """
    Report: an observer, a scheduler or an operator has noticed a fault of a rank.

    The rank itself has not reported this fault.
    """

    rank: int
    kind: FaultKind
    evidence: str
    polluted: bool = False
    """True if the last update may have spread the error, as in `Faulted`."""
    not_after: int | None = None
    """The last step whose copies can be sound, as in `Faulted`. None: not known."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """
    Report: the advice of a recovery plugin on the strategies that the controller offered for an
    incident.
    """

    incident: int
    round: int
    """The round of the offer that is answered. Advice for an older offer has no effect."""
    strategy: str = ""
    """The strategy to follow: one that was offered, or a new name of the plugin for a variant of
    `base`. Empty: the plugin leaves the choice to tft."""
    base: str = ""
    """If `strategy` is a new name of the plugin: the strategy of which it is a variant."""
    not_after: int | None = None
    """If `strategy` is a new name of the plugin: the latest step to which the ranks may return."""
    skip: int = 0
    """If `strategy` is a new name of the plugin: the number of batches to skip."""
    replace: tuple[int, ...] = ()
    """If `strategy` is a new name of the plugin: the ranks to get a new process although their
    present process is alive."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be followed in this incident."""
    wait: float = 0.0
    """Seconds to wait for further advice before a strategy is chosen."""
    why: str
    at: float


# ---------------------------------------------------------------- status that is sent repeatedly


UNSLICED = "buffer "
"""The beginning of the name of a shard's part that is not in the slices, such as a module buffer.
Such a part is compared only when whole copies are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDigest:
    """
    The digest of one slice of a shard at the end of a step, as one rank has computed it.

    With `number` -1 it is instead the digest of what this rank contributed to the gradients of the
    step. It is compared only with the digest of the same rank in another attempt at the step.
    """

    incident: int
    """The last incident of the rank. `incident` and `round` identify the attempt at the step: a
    step that is computed again may have another content."""
    round: int
    step: int
    number: int
    """The number of the slice, from 0."""
    of: int
    """The number of slices that the shard is cut into. One slice is digested in each step."""
    shard: int
    """The index of the shard among the shards of the rank, in the order of `Ready.shards`."""
    digest: int
    """The XXH3-64 of the slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """
    The status of one rank. The agent reads it from the page (memory that it shares with the rank).
    """

    rank: int
    incarnation: int
    position: Position
    training: bool
    """True if the rank is inside `train`. Only then a lack of progress means a fault."""
    moved: float
    """The time when the training thread last made progress."""
    digests: tuple[SliceDigest, ...] = ()
    """The digests of slices that the rank has computed lately. Several beats contain the same
    digest, so that a lost beat does not lose it."""
    kept: int = 0
    """The step of the newest copy of its state that the rank keeps in host memory. 0: no copy."""
    unprotected: int = 0
    """The number of steps in which the update window of the rank opened before another node had the
    rank-local state of that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """
    The status of the ranks of a node. The node's agent sends this message a few times a second.
    """

    node: int
    pulses: tuple[Pulse, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """
    The controller announces that it leads the job, and acknowledges reports.

    `epoch` is the number of this controller.
    """

    epoch: int
    heard: dict[str, int]
    """By sender (for example `rank.3/1.4711`, `node.0/0`): the highest number of a report that the
    controller has handled."""
    state: str = ""
    """The state of the job as a whole: a state of `docs/reference/machine.md`."""
    incident: int = 0
    """The number of the newest incident; 0 before the first."""
    check: str = ""
    """The result of the last requested check: `passed`, or a sentence. Empty: no result yet."""
    compared: int | None = 0
    """The newest step at whose end all copies of every shard are known to have been equal. None:
    each shard has one holder, so that no copies can differ."""
    kept_by: dict[int, int] = field(default_factory=dict)
    """By node: another node that keeps the rank-local state of its ranks, in case the node is lost.
    A node is not listed if no other node can keep the state."""


# ---------------------------------------------------------------- between agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """
    One capture of the rank-local state of a rank.
    """

    step: int
    closed: bool
    """True if the state was captured when the update window of `step` closed. False: it was
    captured before the window opened."""
    content: str
    """The XXH3-128 of the state, hexadecimal. It is the key of the state in
    `LocalStates.contents`."""
    sure: bool
    """True if the state is final for the all-reduces of the step: they are complete, or the state
    did not change before their completion in any earlier step. Other captures are not used."""
    ended: bool
    """True if the rank has ended the step, so that this state is the last one of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStates:
    """
    All valid captures of a rank, for the node that keeps them in case this node is lost.

    If the receiver has kept a capture of the rank that is not listed here, that capture is no
    longer valid. The agent repeats the message until `LocalStatesKept` answers it.
    """

    node: int
    pid: int
    """The pid of the agent that sends. A new agent of the node has new pages (memory shared with
    its ranks), so its numbers begin anew."""
    rank: int
    incarnation: int
    """The newest process of the rank on this node."""
    incident: int
    """`incident` and `round` identify the last rollback of the rank."""
    round: int
    number: int
    """How many captures were written to the page of the rank when it was read."""
    changes: bool
    """True if captures of this rank were seen to change after the all-reduces of their step."""
    captures: tuple[Capture, ...]
    contents: dict[str, str]
    """The captured states (hexadecimal), by digest. States that the receiver has already may be
    left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStatesKept:
    """
    Answer to `LocalStates`: the contents that the receiver has of the rank.
    """

    keeper: int
    """The node that answers."""
    node: int
    pid: int
    rank: int
    incarnation: int
    """`incarnation` and `number` are those of the message that is answered."""
    number: int
    complete: bool
    """True if the keeper has the contents of all captures in that message."""
    contents: tuple[str, ...]
    """The digests of the contents that the keeper has, among those in that message."""


# ---------------------------------------------------------------- orders to ranks
#
# A late order is recognized by its `epoch`, `incident` and `round`. `to` names the ranks that carry
# out the order. `incarnations` gives the incarnation of each rank whose process is not the first
# (0). Two kinds of processes ignore orders because they do not hold their rank: one that was given
# up but still runs, and a successor that will take over later.


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """
    Order to a rank: enter no update window from now on, and report the position.

    The rank's control thread answers at once, even if the training thread is busy.
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
    Order to a rank: stop training after step `finish`, and leave the training loop.

    If step `finish` is not done, the rank has `grace` seconds to finish it, including its tail.
    Then the rank aborts collectives that hang, leaves the loop, and drops its process groups.
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
    Order to a rank: report digests of the state that the rank holds.

    The controller compares them with the digests of the other ranks that hold the same state.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Order to a rank: load the state of the checkpoint in `directory`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    directory: str
    step: int
    """The step whose end state the checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """
    A rank from which a shard can be fetched, and its address.

    The rank holds the shard at the agreed step, and its copy has been verified.
    """

    rank: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """
    One shard to be fetched, and all ranks from which the shard can be fetched.
    """

    shard: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """
    Order to a rank: fetch these shards from other ranks, as they were at the end of `step`.

    The rank verifies the received bytes.
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
    Order to a rank: restore the state at the end of `step` from the rank's own copy in memory.
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
    Order to the ranks: form the process groups anew under `name`.

    All ranks do this together, with the rendezvous store at `host`:`port`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    """The first step that will be computed with these groups. 0: the ranks learn the step only when
    they carry out the order `Reload`."""
    name: str
    host: str
    port: int
    without: tuple[int, ...] = ()
    """The ranks of the world that take no part in the groups, because the job has shrunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """
    Order to the ranks: find the newest checkpoint that the user's program keeps itself, and load
    it.

    All ranks do this together, after the process groups have been formed. In the answer, `held` is
    the step at whose end the checkpoint was saved.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    not_after: int | None = None
    """Checkpoints of steps after this one may be wrong and must not be used. None: there is no
    limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """
    Order to the ranks: build the framework's wrappers anew around the state that each rank now
    holds.

    All ranks do this together.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """
    Order to a rank: set the random generators (RNG) and the data position to the end of `step`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    skip: int = 0
    """The number of batches to draw and drop after the rollback."""
    local_state: dict[int, str] = field(default_factory=dict)
    """The rank-local state that lost processes had captured (hexadecimal), by rank, for a new
    process that may not find it in shared memory."""
    derive: tuple[int, ...] = ()
    """The ranks that must compute their rank-local state from the step number, because they took no
    part in the job or their captured state is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """
    Order to a rank: enter the training loop. `step` is the first step to compute.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    again: bool = False
    """True if the rank must first call the functions that tft calls after step `step` - 1, because
    some rank has not completed them."""
    tails: bool = False
    """True if some rank has reported that its loop marks the end of each step. Then every step,
    also the first one, ends later than its update window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """
    Order to a rank: train to the end of `step`, then wait.

    The rank waits before the update window of step `step` + 1, when its all-reduces of that step
    are complete. It answers when it waits. Its process groups are kept.
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
    Order to a rank: run the check called `name` while the job is paused, and report the result.
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
    Order to a rank that waits after a `Hold` order: continue training from that point.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """
    Order to a rank: write `shards` to files under `directory`, for a last checkpoint.

    The rank also writes rank-local state (RNG and data position): its own if `writes_own`, and that
    of the ranks in `local_state`.
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
    """Shards that this rank writes although another rank writes them too. If these copies fail, the
    checkpoint is still complete."""
    writes_own: bool = True
    """False if the rank has no rank-local state of `step`: it has come back in this incident, or
    the job has trained the step without it."""
    local_state: dict[int, str]
    """The rank-local state (hexadecimal) of ranks that cannot write their own, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """
    Order to a rank: complete a last checkpoint after all ranks have written their files.

    The rank writes the manifest, syncs the files, and renames the directory to its final name.
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
    Order to a rank: return from `Session.run`, because every rank has finished.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """
    Order to a rank: leave `Session.run` with the exit code `code`, because the job is over.
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
    Order to an agent: start the process of a rank. The agent answers with `Spawned`.
    """

    epoch: int
    node: int
    rank: int
    incarnation: int
    cause: str
    successor: bool = False
    """True if the new process is to take over the rank later, from a process that still trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """
    Order to an agent: end the process of a rank at once. The agent answers with `Exited`.
    """

    epoch: int
    node: int
    rank: int
    incarnation: int
    last_words: bool
    """True if the process must first write the stacks of its threads."""
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """
    Order to an agent: report the rank-local state of these ranks of a lost node, which this node
    has kept. The agent answers with one `Recalled` for each rank.
    """

    epoch: int
    node: int
    """The node that has kept the state."""
    lost: int
    """The node that was lost."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNode:
    """
    Order to an agent: leave the job, because the job is over.

    The agent gives its ranks `grace` seconds to leave, and ends the processes that are left. Then
    the agent leaves.
    """

    epoch: int
    grace: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """
    Order to one process: leave the job, because the controller does not accept that the process
    holds `rank`.
    """

    epoch: int
    rank: int
    pid: int
    started: int
    why: str


RankReport = (
    Joined | Ready | Faulted | Answered | Trained | Finished | Checkpointed | CheckpointFailed
)
NodeReport = NodeJoined | Spawned | Exited | StoreOpened | Recalled
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
NodeOrder = Spawn | Kill | Recall | EndNode
Order = RankOrder | NodeOrder | Refused
AgentMessage = LocalStates | LocalStatesKept
Message = Report | Order | Beat | Lead | AgentMessage

MESSAGES: tuple[type, ...] = (
    Joined, Ready, Faulted, Answered, Trained, Finished, Checkpointed, CheckpointFailed,
    NodeJoined, Spawned, Exited, StoreOpened, Recalled, NodeLost, StopRequested,
    PauseRequested, ResumeRequested, SwitchRequested, Noticed, Advised,
    Beat, Lead, LocalStates, LocalStatesKept,
    Freeze, Stop, Compare, Load, Fetch, Restore, Regroup, Reload, Rebuild, Rollback, Resume, Hold, Check,
    Release, Save, Commit, Complete, End,
    Spawn, Kill, Recall, EndNode, Refused,
)  # fmt: skip
"""All messages, in the order of `docs/reference/wire.md`. The class name is the name on the
wire."""

ORDER_NAMES: dict[type[RankOrder], OrderName] = {
    Freeze: "freeze", Stop: "stop", Compare: "compare", Load: "load", Fetch: "fetch", Restore: "restore",
    Regroup: "regroup", Reload: "reload", Rebuild: "rebuild", Rollback: "rollback",
    Resume: "resume", Hold: "hold", Check: "check", Release: "release", Save: "save", Commit: "commit", Complete: "complete",
    End: "end",
}  # fmt: skip
"""The name of each order in the answer of a rank (`Answered.order`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """
    A message with the name of its job and its sender, in the form in which it is sent on the bus.

    `number` counts the reports of a sender from 1. It is 0 for messages that the receiver does not
    acknowledge: orders, and messages that are sent repeatedly, such as `Beat`.
    """

    job: str
    sender: str
    """For example `rank.3/1.4711` (rank, incarnation, pid), `node.0/0`, `run.0/0`, `controller/2`
    (epoch), `ask.9f86d081` (a command of `tft`)."""
    number: int
    message: Message
