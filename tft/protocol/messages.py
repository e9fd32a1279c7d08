"""
All messages between the processes of a job. `docs/reference/wire.md` describes each field.

A message cannot be changed after its creation. Its fields are checked when it is received. There
are three groups of messages.

Reports go from ranks, agents, the launcher and commands of `tft` to the controller. The sender
repeats a report until the controller has acknowledged the report.

Orders go from the controller to ranks and agents. The controller repeats an order until the order
is answered.

`Beat` and `Lead` describe a current status and are sent repeatedly. Only the newest `Beat` or
`Lead` of a sender matters. The same holds for `LocalStates` and `LocalStatesKept`, which agents
send to each other.

Some fields have the same meaning in all messages. Ranks are global ranks. Steps are optimizer
steps, counted from 1; step 0 means that no step has been done. `at` is the time when the message
was made, in seconds of CLOCK_MONOTONIC on the sender's machine. `incarnation` is the number of a
rank's process: 0 for the first, one more for each replacement.
"""

from dataclasses import dataclass, field
from typing import Literal

VERSION = 12
"""The version of the protocol. Increase it when the fields of a message change. A message from a
process with another version is refused with an error."""

FaultKind = Literal[
    "process", "node", "memory", "network", "numeric", "hang", "straggler", "corruption", "software"
]

OrderName = Literal[
    "freeze", "stop", "compare", "load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback", "resume",
    "hold", "check", "release", "save", "commit", "complete", "end",
]  # fmt: skip

Verdict = Literal["pass", "isolate", "end"]
"""The result of a check that ran on a rank while the job was paused: `pass` (continue), `isolate`
(take the rank's node out of the job), or `end` (end the job)."""


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
    """True while the loop has not reached the end of step `step`. Its code after the update window,
    such as a scheduler's step or an evaluation, may have run in part."""
    after: bool = False
    """True if functions of the user that tft calls after step `step` (`session.after_step`) are
    running or still to be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """
    A shard (one piece of training state), and all ranks that hold a copy of the shard.

    These ranks are called the shard group of the shard.
    """

    shard: str
    """The name of the shard."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """
    One file of a last checkpoint (the checkpoint that survivors write before a job ends), as
    described by the rank that wrote the file.
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
    """How many processes this rank was given before. The controller counts, and the process gets
    the number from its agent."""
    world: int
    pid: int
    started: int
    """The start time of the process, in clock ticks since boot. The pid alone does not identify the
    process, because the kernel reuses pids."""
    host: str
    address: str
    """HOST:PORT where this rank serves its shards to other ranks."""
    adaptor: str
    strategies: tuple[str, ...]
    """The strategies that the adaptor supports."""
    derives: bool = False
    """True if the adaptor can compute the rank-local state of this rank from a step number alone,
    when the captured rank-local state is lost."""
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
    """The ranks of the model replica of this rank (the ranks that hold the whole model together).
    They leave and return only together when the job shrinks or grows. Empty: this rank alone."""
    reloads: bool = False
    """True if the user's program writes checkpoints without tft, and can find and load the newest
    of them when the order `Reload` asks for that."""
    strategies: tuple[str, ...] = ()
    """The strategies that the adaptor supports with this training state. Empty: the strategies that
    the rank has named in `Joined`."""
    after: float = 0.0
    """The longest time in seconds that the user's functions may take that tft calls after a step
    (`session.after_step`). 0: there are no such functions."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """
    Digests of the losses and gradient norms that a rank has computed in one step.

    If the step is computed a second time, equal digests show that the rank has computed the same
    numbers again.
    """

    own: str
    """Digest of the losses, and of numbers about the gradients that this rank computed before they
    were reduced."""
    common: str
    """Digest of the norm of the reduced gradients."""
    batches: int = 1
    """How many batches the rank has drawn in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """
    Report of a rank: an exception has left the training loop.
    """

    rank: int
    incarnation: int
    kind: FaultKind
    step: int
    """The step that was being computed."""
    summary: str
    """The exception's type and message, in one line."""
    traceback: str
    position: Position
    polluted: bool = False
    """True if the last update may have spread wrong numbers to other ranks. Then no copy of the
    state of `position.step` is used."""
    not_after: int | None = None
    """The last step whose copies are not affected: the error happened after that step, and was only
    noticed later. Copies of later steps are not used. None: the error is not known to be older."""
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that only another process can
    continue."""
    refused: StepNumbers | None = None
    """The numbers because of which the rank has refused the update of `step`, for example a loss
    that is NaN. The state is not changed then. None: the fault is not such a refusal."""
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
    """Why the order could not be carried out. None: the order was carried out."""
    context_lost: bool = False
    """True if the order failed because the device accepts no more work from this process."""
    position: Position
    held: int | None
    """The step of the complete state that this rank has in memory. None: the state is incomplete.
    """
    backups: tuple[int, ...] = ()
    """The earlier steps of which this rank keeps a copy of the complete state in memory."""
    waiting: bool = False
    """For `freeze`: True if the training thread waits for other ranks in a collective, or is not in
    the training loop. So this rank is not the one that hangs."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """For `compare`, `fetch`, `restore` and `reload`: digests of the state of step `held`, by shard
    and part of the shard. An empty digest means that the part is not compared, because ranks have
    different content there by design. An empty dict means that the rank has no complete state, or
    that its state cannot be compared."""
    compared: float = 0.0
    """The time in seconds that the rank needed to compute the digests."""
    line: str = ""
    """For `stop`: the line of the script (FILE:LINE) at which the loop was left, if it was left in
    the tail of step `held`. Empty: it was not left in a tail."""
    odd: dict[int, str] = field(default_factory=dict)
    """For `fetch`: the ranks from which this rank did not use the shard, each with the reason."""
    inexact: tuple[str, ...] = ()
    """What the loop of this rank does in its tails that an incident cannot undo or repeat exactly,
    one sentence for each habit."""
    tails: bool = False
    """True if the loop of this rank marks the end of each step. A step then ends later than its
    update window."""
    files: tuple[SavedFile, ...] = ()
    """For `save`: the files that were written."""
    verdict: Verdict = "pass"
    """For `check`: the result."""
    finding: str = ""
    """For `check`: the reason for a verdict other than `pass`, as a sentence."""
    local_state: dict[int, str] = field(default_factory=dict)
    """For a `save` that failed: the rank-local state that this rank captured last (hexadecimal), by
    step. The job may now have to save an earlier step, and another rank writes this state then."""
    began: float
    """The time at which the rank began to carry out the order, on the same clock as `at`."""
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
    """Digests of what the rank has computed in this step. None: no plugin watches the numbers."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """
    Report of a rank: the user's function `train` has returned.

    The process stays and waits for the other ranks, which can still fetch its state.
    """

    rank: int
    incarnation: int
    step: int
    """The last step that was done."""
    sliced: bool = False
    """True if slices of the rank's copies were compared while training (`tft_integrity`). Then the
    controller has the whole copies compared once more before the job is complete."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """
    Report of a rank: a periodic checkpoint of the whole job is complete.

    The job returns to this checkpoint if an incident loses all copies of a shard.
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

    Either the rank could not do its part of the checkpoint, or the copies of a shard differ between
    ranks. No checkpoint of that step exists.
    """

    rank: int
    incarnation: int
    step: int
    """The step whose end state the checkpoint would have held."""
    why: str
    differ: bool = False
    """True if the copies of a shard differ between ranks, which is a fault. False: the checkpoint
    failed for another reason, and training continues."""
    wrong: tuple[int, ...] = ()
    """The ranks whose copies are wrong. Empty: the wrong copies are not known."""
    unsliced: bool = False
    """True if the copies differ in a part that is not in the slices compared while training. So an
    earlier equal comparison of slices says nothing about that part."""
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
    """The stacks of the threads, which the process wrote before it was killed (`Kill.last_words`).
    Empty: the process was not asked for them, or did not write them."""
    stopped: bool = False
    """True if the process was in the stopped state (SIGSTOP) when it was ended."""
    script_ended: bool = False
    """True if the script had ended without an error, and its exit handlers (`atexit`) had run,
    before the process ended."""
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

    It is the answer to `Recall`.
    """

    node: int
    """The node that reports."""
    lost: int
    """The node that was lost."""
    rank: int
    incarnation: int
    """The incarnation of the process that captured the state. -1: this node has kept nothing of
    the rank."""
    incident: int
    """The number of the incident in which the rank was last rolled back before these captures. If
    the rank was rolled back again later, the controller ignores captures of steps that this later
    rollback has given up."""
    round: int
    """The round (attempt) of `incident` in which that rollback was made."""
    local_state: dict[int, str]
    """The rank-local state (hexadecimal), by step."""
    early: tuple[int, ...] = ()
    """The steps whose state here was captured before the step had ended. A step is listed only if
    this rank is known to change its rank-local state between that moment and the end of a step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """
    Report: the agent of a node has ended or is silent, so the node is lost.

    The launcher reports that the agent's process has ended. The controller makes the report itself
    if it has not heard from the agent for too long.
    """

    node: int
    pid: int = 0
    """The pid of the agent that was lost. 0: the agent that the node has at present."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """
    Report: a person or program asks for the end of the job, or of one node.

    If possible, the job saves a last checkpoint first.
    """

    why: str
    signal: int
    """The number of the signal that asked for the end. 0: there was no signal."""
    node: int | None = None
    """The node whose launcher was asked to end. The job continues without the node if the node's
    ranks have moved to other nodes, or are about to. None: the whole job is asked to end."""
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
    """The name of the check to run during the pause. The job continues by itself after the check.
    Empty: no check is run, and the job waits for `ResumeRequested`."""
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
    """True if the last update may have spread wrong numbers to other ranks. Then no copy of the
    state after that update is used."""
    not_after: int | None = None
    """The last step whose copies are not affected. Copies of later steps are not used. None: not
    known."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """
    Report: the advice of a recovery plugin on the strategies that the controller offered for an
    incident.
    """

    incident: int
    round: int
    """The round (attempt) of the incident in which the strategies were offered. Advice for an older
    round has no effect."""
    strategy: str = ""
    """The strategy to follow: one that was offered, or a new name of the plugin for a variant of
    `base`. Empty: the plugin leaves the choice to tft."""
    base: str = ""
    """If `strategy` is a new name of the plugin: the strategy of which it is a variant."""
    not_after: int | None = None
    """If `strategy` is a new name of the plugin: all ranks return to the end of this step or of an
    earlier step. None: the plugin sets no limit."""
    skip: int = 0
    """If `strategy` is a new name of the plugin: the number of batches to draw and drop after the
    return."""
    replace: tuple[int, ...] = ()
    """If `strategy` is a new name of the plugin: ranks that get another process although their
    process is alive."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be followed in this incident."""
    wait: float = 0.0
    """Seconds to wait for further advice before a strategy is chosen."""
    why: str
    at: float


# ---------------------------------------------------------------- current status, sent repeatedly


UNSLICED = "buffer "
"""The prefix that marks the name of a part of a shard whose content is in no slice, such as a
buffer of a module. Such a part is compared only when whole copies are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDigest:
    """
    The digest of one slice of a shard at the end of a step, as one rank has computed it.

    Slices are digested to compare the copies of a shard while the job trains. With `number` -1 the
    digest is not of a slice, but of what the rank alone contributed to the gradients of the step.
    Such a digest is compared only with that of the same rank when the step is computed again.
    """

    incident: int
    """The number of the last incident before the step was computed; 0: there was none. Only digests
    with the same `incident` and `round` are compared, because a step that is computed again after
    an incident may have another result."""
    round: int
    """The last round (attempt) of `incident`."""
    step: int
    number: int
    """The number of the slice, from 0, or -1."""
    of: int
    """The number of slices into which the shard is cut. One slice is digested in each step."""
    shard: int
    """The index of the shard among the shards of the rank, in the order of `Ready.shards`."""
    digest: int
    """The XXH3-64 of the slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """
    The status of one rank. The agent reads it from the memory page that it shares with the rank.
    """

    rank: int
    incarnation: int
    position: Position
    training: bool
    """True if the rank is inside the user's function `train`. A rank outside of it may be without
    progress for long, so only a rank inside of it can count as hanging."""
    moved: float
    """The time when the training thread last made progress (CLOCK_MONOTONIC, seconds)."""
    digests: tuple[SliceDigest, ...] = ()
    """The newest slice digests of the rank. The next `Beat` messages repeat them, in case this one
    is lost."""
    kept: int = 0
    """The step of the newest copy of its whole state that the rank keeps in host memory
    (`--backup-every`). 0: the rank has no such copy."""
    unprotected: int = 0
    """How many update windows of the rank have opened although no other node had the rank-local
    state of the step yet. If the node is lost at such a moment, that state is lost."""


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

    `epoch` is the number of this controller. Orders of a controller with a lower number are
    refused.
    """

    epoch: int
    heard: dict[str, int]
    """By sender (for example `rank.3/1.4711`, `node.0/0`): the highest number of a report that the
    controller has handled. The sender stops repeating its reports up to this number."""
    state: str = ""
    """The name of the job's state, one of the states in `docs/reference/machine.md`."""
    incident: int = 0
    """The number of the newest incident; 0 before the first."""
    check: str = ""
    """The result of the last check that was asked for: `passed`, or a sentence that says why it has
    not passed. Empty: there is no result yet."""
    compared: int | None = 0
    """The newest step at whose end all copies of every shard are known to have been equal. None:
    every shard has only one holder, so there is nothing to compare."""
    kept_by: dict[int, int] = field(default_factory=dict)
    """By node: the other node that keeps the rank-local state of the node's ranks, in case the node
    is lost. A node for which no other node does that is not listed."""


# ---------------------------------------------------------------- between agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """
    One capture of the rank-local state of a rank: random generators, data position and the like, as
    they were at one moment of a step.
    """

    step: int
    closed: bool
    """True if the state was captured after the update window of `step` had closed. False: it was
    captured earlier in the step."""
    content: str
    """The XXH3-128 of the captured state, hexadecimal. It is the key in `LocalStates.contents`.
    Captures of equal states have the same key."""
    sure: bool
    """True if this capture may be used. It may be used if the all-reduces of the step are complete,
    or if in all earlier steps of the process the state did not change between its capture and the
    completion of the all-reduces."""
    ended: bool
    """True if the rank has ended the step, so the state of this step does not change any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStates:
    """
    All valid captures of a rank, sent from its agent to the agent of another node, which keeps them
    in case this node is lost.

    The receiver drops all captures of the rank that are not listed here. The sender repeats the
    message until `LocalStatesKept` answers it.
    """

    node: int
    """The node that sends."""
    pid: int
    """The pid of the agent that sends. If the node gets another agent, `number` starts anew."""
    rank: int
    incarnation: int
    """The newest incarnation of the rank on this node."""
    incident: int
    """The number of the incident in which the rank was last rolled back; 0: it never was."""
    round: int
    """The round (attempt) of `incident` in which the rank was rolled back."""
    number: int
    """How many captures the rank had written to its page (the memory that it shares with the agent)
    when the agent read the page. A higher number is newer."""
    changes: bool
    """True if the rank-local state of this rank was seen to change after the all-reduces of a step,
    so that a capture from before the end of a step may differ from the state at its end."""
    captures: tuple[Capture, ...]
    contents: dict[str, str]
    """By digest (`Capture.content`): the captured state (hexadecimal). States that the receiver is
    known to have are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStatesKept:
    """
    Answer to `LocalStates`: which captured states of the rank the receiver has.

    `node`, `pid`, `rank`, `incarnation` and `number` are copied from the message that is answered.
    """

    keeper: int
    """The node that answers."""
    node: int
    pid: int
    rank: int
    incarnation: int
    number: int
    complete: bool
    """True if the receiver has the captured states of all captures in that message."""
    contents: tuple[str, ...]
    """The digests (`Capture.content`) of the captured states that the receiver has."""


# ---------------------------------------------------------------- orders to ranks
#
# These fields are in all orders to ranks. By `epoch` (the number of the controller), `incident` and
# `round` (the attempt within the incident) a rank recognizes an order that arrives too late. `to`
# lists the ranks that carry out the order. `incarnations` has an entry for each rank whose present
# process is not its first one (0). A process with another incarnation ignores the order. Such a
# process was given up but still runs, or is a successor that will take the rank over later.


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

    If step `finish` is not done, the rank has `grace` seconds to finish it, including its tail (the
    code between the update window and the end of the step). Then the rank aborts collectives that
    still wait, leaves the loop, and drops its process groups.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    finish: int
    grace: float
    """The time in seconds for step `finish`, before collectives are aborted."""


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
    """The first step that will be computed with these groups. 0: the step is not known yet, because
    the ranks will load a checkpoint that they find themselves (`Reload`)."""
    name: str
    """A name that no earlier set of groups has had."""
    host: str
    port: int
    without: tuple[int, ...] = ()
    """The ranks that are not in the groups, because the job continues without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """
    Order to the ranks: find the newest checkpoint that the user's program keeps itself, and load
    it.

    All ranks do this together, after the process groups have been formed. In the answer
    (`Answered`), `held` is the step at whose end the checkpoint was saved.
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
    Order to a rank: set the rank-local state, such as random generators and data position, to that
    of the end of `step`.
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
    """By rank: the rank-local state (hexadecimal) that the rank's lost process had captured. The
    new process uses it if it does not find the captured state in the shared memory of its node."""
    derive: tuple[int, ...] = ()
    """The ranks that must compute their rank-local state from the step number, because they have
    not trained lately or their captured state is lost."""


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
    """True: before step `step`, call again the user's functions that are called after step `step` -
    1 (`session.after_step`), because some rank may not have completed them."""
    tails: bool = False
    """True if some rank has reported that its loop marks the end of each step. Then a rank must not
    take the end of an update window for the end of a step, not even in its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """
    Order to a rank: pause between `step` and the next step.

    The rank computes step `step` + 1 up to its update window, waits there, and then answers. So all
    its all-reduces of step `step` + 1 are complete, and the state is that of the end of `step`. The
    process groups are kept.
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
    """Shards that this rank writes as a second copy, because another rank writes them too. If such
    a copy cannot be written, the checkpoint is still complete."""
    writes_own: bool = True
    """False if the rank has no rank-local state of `step`, because its process is new in this
    incident, or because the job has trained the step without this rank."""
    local_state: dict[int, str]
    """By rank: the rank-local state (hexadecimal) of ranks that cannot write their own. This rank
    writes it for them."""


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
    """True if the rank still has a process that trains. The new process takes the rank over from
    that process later."""


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

    The agent waits `grace` seconds for the processes of its ranks to end, and kills those that
    still run. Then the agent ends.
    """

    epoch: int
    grace: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """
    Order to one process: end, because the controller does not accept this process as the process of
    `rank`.
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
"""The name of each order in answers to it (`Answered.order`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """
    A message with the name of its job and its sender, in the form in which it is sent on the bus.

    `number` counts the reports of a sender from 1. It is 0 for a message whose number no receiver
    acknowledges: an order, or a status that is sent repeatedly, such as `Beat`.
    """

    job: str
    sender: str
    """For example `rank.3/1.4711` (rank, incarnation, pid), `node.0/0`, `run.0/0`, `controller/2`
    (epoch), `ask.9f86d081` (a command of `tft`)."""
    number: int
    message: Message
