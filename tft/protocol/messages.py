"""
All messages between the processes of a job. `docs/reference/wire.md` describes each field.

A message cannot be changed after its creation. Its fields are checked when it is received. There
are three groups of messages.

Reports go from ranks, agents, the launcher and commands of `tft` to the controller. The sender
repeats a report until the controller has acknowledged the report.

Orders go from the controller to ranks and agents. The controller repeats an order until the order
is answered.

`Beat` (status of ranks) and `Lead` (status of the controller) are sent repeatedly. Only the newest
`Beat` or `Lead` of a sender matters. The same holds for `LocalStates` and `LocalStatesKept`, by
which agents keep the rank-local state of other nodes.

Some fields have the same meaning in all messages. Ranks are global ranks. Steps are optimizer
steps, counted from 1; step 0 means that no step has been done. `at` is the time when the message
was made, in seconds of CLOCK_MONOTONIC on the sender's machine. `incarnation` is the number of a
rank's process: 0 for the first, one more for each replacement.
"""

from dataclasses import dataclass, field
from typing import Literal

VERSION = 15
"""The version of the protocol. Increase this number when the fields of a message change. A message
from a process with another version is refused with an error."""

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
    """True while the training loop has not reached the end of step `step`. The code of the loop
    after the update window, such as a scheduler's step or an evaluation, may have run in part."""
    after: bool = False
    """True if tft has not completed the calls of the user's functions that follow step `step`
    (`session.after_step`)."""


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
    One file of a checkpoint, as described by the rank that wrote the file.
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
    """How many processes this rank had before this process. The controller counts the processes of
    each rank, and the process learns its number from its agent."""
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
    """The recovery strategies (`retry`, `recover`, …) that the adaptor supports."""
    derives: bool = False
    """True if the adaptor can compute the rank-local state of this rank from a step number alone,
    when the captured rank-local state is lost."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """
    Report of a rank: the rank has taken over the user's training state (`session.adopt`).

    After this report, the rank waits in `Session.run` for its first order.
    """

    rank: int
    incarnation: int
    shards: tuple[ShardCopies, ...]
    column: tuple[int, ...] = ()
    """The ranks of the model replica of this rank (the ranks that hold the whole model together).
    When the job shrinks or grows, these ranks leave and return only together. Empty: this rank
    holds the whole model alone."""
    reloads: bool = False
    """True if the user's program writes checkpoints without tft, and can find and load the newest
    such checkpoint when the order `Reload` asks for that."""
    strategies: tuple[str, ...] = ()
    """The recovery strategies that the adaptor supports with this training state. Empty: the
    strategies that the rank has named in `Joined`."""
    after: float = 0.0
    """The limit in seconds for the user's functions that tft calls after a step
    (`session.after_step`). 0: there are no such functions."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """
    Digests of the losses and gradient norms that a rank has computed in one step.

    If the step is computed a second time, its digests are compared with the first ones. Equal
    digests show that the rank has computed the same numbers again.
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
    """The step that was being computed when the exception was raised."""
    summary: str
    """The exception's type and message, in one line."""
    traceback: str
    position: Position
    polluted: bool = False
    """True if the last update may have spread wrong numbers to other ranks. Then no copy of the
    state of `position.step` is used."""
    not_after: int | None = None
    """The last step whose copies are not affected, if the error began before the rank noticed it.
    Copies of later steps are not used. None: the error is not known to have begun earlier."""
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that only another process can
    continue."""
    refused: StepNumbers | None = None
    """If the rank has refused the update of `step` because of wrong numbers, such as a loss that is
    NaN: digests of these numbers. A refused update has not changed the state. None: the rank has
    refused no update."""
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
    """The earlier steps for which this rank keeps a copy of the complete state in memory."""
    waiting: bool = False
    """For `freeze`: True if the training thread waits for other ranks in a collective, or is not in
    the training loop. When the job hangs, a waiting rank is not the cause."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """For `compare`, `fetch`, `restore` and `reload`: digests of the state of step `held`, by shard
    and part of the shard. An empty digest means that the part is not compared, because ranks have
    different content in this part by design. An empty dict means that the rank has no complete
    state, or that its state cannot be compared."""
    compared: float = 0.0
    """The time in seconds that the rank needed to compute the digests of its state."""
    line: str = ""
    """For `stop`: the line of the script (FILE:LINE) at which the training thread left the loop, if
    it left the loop in the tail of step `held` (the code after the update). Empty: it did not leave
    the loop in a tail."""
    odd: dict[int, str] = field(default_factory=dict)
    """For `fetch`: the ranks that did not deliver a shard as needed, each with a text that says
    what went wrong. The rank that answers has fetched the shard from other ranks."""
    lost: str = ""
    """For `rollback`: a sentence that says which part of the rank-local state was lost and so could
    not be restored. Empty: everything was restored."""
    inexact: tuple[str, ...] = ()
    """Sentences about code in this rank's loop whose effect cannot be undone or repeated exactly in
    an incident. An example is code in the tail of a step (after the update) that draws random
    numbers."""
    tails: bool = False
    """True if the loop of this rank marks the end of each step. Then a step does not end with its
    update window, but at this mark."""
    files: tuple[SavedFile, ...] = ()
    """For `save`: the files that were written."""
    verdict: Verdict = "pass"
    """For `check`: the result of the check."""
    finding: str = ""
    """For `check`: the reason for a verdict other than `pass`, as a sentence."""
    local_state: dict[int, str] = field(default_factory=dict)
    """For a `save` that failed: the rank-local state that this rank captured last (hexadecimal), by
    step. Another rank can then write this state into the checkpoint. There is a state for several
    steps, because the checkpoint may have to be that of an earlier step."""
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
    """Digests of the losses and gradient norms of this step. None: no plugin watches them."""
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
    """True if slices of the rank's shards were compared with other ranks while the rank trained
    (plugin `tft_integrity`). Then the controller orders a comparison of whole shards before the job
    is complete."""
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
    """True if all ranks' copies of the saved state were compared and were equal."""
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
    """True if the copies of a shard differ between ranks, which counts as a fault. False: the
    checkpoint failed for another reason, and training continues."""
    wrong: tuple[int, ...] = ()
    """The ranks whose copies are wrong. Empty: it is not known which copies are wrong."""
    unsliced: bool = False
    """True if the copies differ in a part of the state that is in no slice. While the job trains,
    only slices are compared, so earlier comparisons say nothing about this part."""
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
    """The number of further ranks for which the node has room, so that ranks of a lost node can be
    started here."""
    step: int = 0
    """The highest step that any rank has completed (see `NodeLost.step`). It is needed if an
    earlier agent of this node is lost, and its ranks with it."""
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
    """The last position of the rank in its training loop, as the agent has read it from the shared
    memory that the process left behind."""
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

    This report is the answer to the order `Recall`.
    """

    node: int
    """The node that reports, because it has kept the state."""
    lost: int
    """The node that was lost."""
    rank: int
    incarnation: int
    """The incarnation of the process that captured the state. -1: this node has kept nothing of
    the rank."""
    incident: int
    """The number of the incident in which the rank was last rolled back before this state was
    captured. If the rank was rolled back again later, the controller ignores the captured state of
    steps that this later rollback has given up."""
    round: int
    """The round (attempt) of `incident` in which that rollback was made."""
    local_state: dict[int, str]
    """By step: the rank-local state (hexadecimal) of the rank at this step."""
    early: tuple[int, ...] = ()
    """The steps whose state in `local_state` was captured before the step had ended. Empty if this
    rank was never seen to change its rank-local state after the all-reduces of a step."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """
    Report: the agent of a node has ended or is silent, so the node is lost.

    The launcher sends this report when the agent's process has ended. The controller makes the
    report itself when it has not heard from the agent for too long.
    """

    node: int
    pid: int = 0
    """The pid of the agent that was lost. 0: the agent that the node has at present."""
    step: int = 0
    """The highest step that any rank has completed, according to heartbeats. 0: this step is not
    known. The controller fills in this field when it receives the report: if all nodes are lost, no
    process but the controller knows how far the ranks had come."""
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
    """The node whose launcher was asked to end. The job continues without this node if the node's
    ranks have moved to other nodes, or are about to move. None: the whole job is asked to end."""
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
    Report: a person or program asks to replace the processes of these ranks by processes on other
    nodes, while training goes on.

    All named ranks move at the same time, as soon as nodes have enough room for all of them. A new
    request replaces an earlier request: a rank that only the earlier request names is not moved.
    """

    ranks: tuple[int, ...]
    """The ranks that are to move to other nodes. Empty: cancel an earlier request."""
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """
    Report: an observer, such as a plugin, a scheduler or an operator, has noticed a fault of a
    rank. The rank itself has not reported this fault.
    """

    rank: int
    kind: FaultKind
    evidence: str
    polluted: bool = False
    """True if the last update may have spread wrong numbers to other ranks. Then no copy of the
    state after that update is used."""
    not_after: int | None = None
    """The last step whose copies the fault has not affected. Copies of later steps are not used.
    None: this step is not known."""
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
    """If `strategy` is a new name of the plugin: the last step to whose end the ranks may return.
    None: the plugin sets no limit."""
    skip: int = 0
    """If `strategy` is a new name of the plugin: the number of batches to draw and drop after the
    ranks have returned to an earlier step."""
    replace: tuple[int, ...] = ()
    """If `strategy` is a new name of the plugin: the ranks whose process is replaced by another
    process although it is alive."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be followed in this incident."""
    wait: float = 0.0
    """Seconds to wait for further advice before a strategy is chosen."""
    why: str
    at: float


# ---------------------------------------------------------------- status messages, sent repeatedly


UNSLICED = "buffer "
"""The prefix that marks the name of a part of a shard whose content is in no slice, such as a
buffer of a module. Such a part is compared only when whole copies are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDigest:
    """
    The digest of one slice of a shard at the end of a step, as one rank has computed it.

    Slices are digested to compare the copies of a shard while the job trains. If `number` is -1,
    the digest is not of a slice, but of what this rank alone contributed to the gradients of the
    step. Such a digest is compared only with the digest from the same rank for the same step,
    computed again after an incident.
    """

    incident: int
    """The number of the last incident before the step was computed; 0: there was none. Only digests
    with the same `incident` and `round` are compared, because a step that is computed again after
    an incident may have another result."""
    round: int
    """The last round of `incident` (the last attempt to recover from it)."""
    step: int
    number: int
    """The number of the slice within the shard, from 0. -1: the digest is of gradients."""
    of: int
    """The number of slices into which the shard is cut. One slice is digested in each step."""
    shard: int
    """The index of the shard among the shards of the rank, in the order of `Ready.shards`."""
    digest: int
    """The XXH3-64 of the slice, or of what the rank contributed to the gradients (see `number`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """
    The times that a rank has needed for one step, in seconds. Times in which it has waited for
    other ranks are in `waited` only.
    """

    step: int
    input: float
    """From the end of the step before until the first forward pass: mostly the time to load data.
    """
    compute: float
    """From the first forward pass until the update window opens."""
    update: float
    """From the beginning to the end of the update window."""
    waited: float
    """The time in which the training thread has waited for other ranks, in the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """
    The status of one rank. The agent of the node reads this status from the memory that it shares
    with the rank.
    """

    rank: int
    incarnation: int
    position: Position
    training: bool
    """True if the rank is inside the user's function `train`. Outside of this function, a rank may
    make no progress for long although it does not hang, so its standstill is not counted."""
    moved: float
    """The time when the training thread last made progress (CLOCK_MONOTONIC, seconds)."""
    digests: tuple[SliceDigest, ...] = ()
    """The newest slice digests of the rank. The following `Beat` messages repeat these digests, in
    case this message is lost."""
    kept: int = 0
    """The step of the newest copy of the rank's state in host memory (option `--backup-every`). 0:
    there is no copy in host memory."""
    unprotected: int = 0
    """How many update windows of the rank have opened before another node had a copy of the
    rank-local state of the step. If this node is lost at such a moment, the rank-local state is
    lost."""
    work: tuple[StepWork, ...] = ()
    """The times of the steps since the last `Beat`, if they are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """
    The status of the ranks of a node. The node's agent sends this message a few times a second.
    """

    node: int
    pulses: tuple[Pulse, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStanding:
    """
    Where a rank stands in one of its process groups.
    """

    group: str
    """The name of the group, which is the same on all ranks of the group."""
    size: int
    """The number of ranks in the group."""
    members: str
    """A digest of the ranks of the group, or the ranks themselves as text if they are few. Groups
    with the same name and members are one group."""
    entered: int
    """The number of collectives of the group that the rank has entered. Messages between two ranks
    are not counted."""
    inside: str
    """The collective in which the rank waits for other ranks, such as `allreduce of 1024 elements`.
    Empty: the rank waits in no collective, or the framework does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquire:
    """
    The controller asks all ranks where they stand, because no rank makes progress. The ranks answer
    with `Whereabouts`. The answers change nothing in the job: they are for operators.
    """

    epoch: int
    number: int
    """The number of this question. The answers repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """
    A rank says where its training thread stands. The control thread sends this answer.
    """

    rank: int
    incarnation: int
    inquiry: int
    """The number of the question (`Inquire.number`) that this message answers."""
    position: Position
    waiting: bool
    """True if the training thread may be waiting for other ranks."""
    line: str
    """The innermost line (FILE:LINE) of the user's code in which the training thread is. Empty: the
    training thread is in no line of the user's code."""
    stack: str
    """The innermost frames on the stack of the training thread, as text."""
    groups: tuple[GroupStanding, ...]
    """The process groups of the rank. Empty: the adaptor does not report them."""
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
    """By sender (for example `rank.3/1.4711`, `node.0/3f9a2c51`): the highest number of a report from
    this sender that the controller has handled. The sender stops repeating reports up to this
    number."""
    state: str = ""
    """The name of the job's state, one of the states in `docs/reference/machine.md`."""
    incident: int = 0
    """The number of the newest incident; 0 before the first."""
    check: str = ""
    """The result of the last requested check of links and devices: `passed`, or a sentence that
    says what was found. Empty: there is no result yet."""
    compared: int | None = 0
    """The newest step at whose end all copies of every shard are known to have been equal. None:
    every shard has only one holder, so there is nothing to compare."""
    kept_by: dict[int, int] = field(default_factory=dict)
    """By node: the other node that keeps copies of the rank-local state of this node's ranks, in
    case this node is lost. A node without such a keeper has no entry."""
    run: str = ""
    """The run (one start of `tft run` or `tft lead`) that this controller belongs to. Empty: the
    controller was started by hand."""
    silent: tuple[int, ...] = ()
    """The nodes that count as lost because they were silent. The agent of such a node joins the job
    again when its ranks have ended, so that the job can use the node again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """
    One sentence of the controller for people: an incident is over, or a rank is slow.
    """

    number: int
    """The number of the sentence, by which a console recognizes sentences that it has printed
    already. Each controller counts from 1."""
    text: str
    """A sentence without its full stop."""
    incident: int = 0
    """The number of the incident that is over; 0 for a remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """
    The last sentences of the controller for people. A console prints the sentences that it has not
    printed yet.
    """

    epoch: int
    """The number of the controller."""
    notices: tuple[Notice, ...]
    """The last notices, the oldest first."""


# ---------------------------------------------------------------- messages between agents


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
    """True if this capture may be used, for one of two reasons: the all-reduces of the step are
    complete; or in all earlier steps of the process the state did not change between the capture
    and the completion of the all-reduces."""
    ended: bool
    """True if the rank has ended the step, so the state of this step does not change any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStates:
    """
    All valid captures of a rank. The agent of the rank sends this message to the agent of another
    node, which keeps the captures in case the sender's node is lost.

    The receiver drops all captures of the rank that are not listed in this message. The sender
    repeats the message until `LocalStatesKept` answers it.
    """

    node: int
    """The node whose agent sends this message."""
    pid: int
    """The pid of the agent that sends the message. It shows the receiver that the node has got
    another agent, whose `number` starts from 1 again."""
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
    """True if the rank-local state of this rank was seen to change after the all-reduces of a step.
    Then a capture from before the end of a step may differ from the state at the end of the step.
    """
    captures: tuple[Capture, ...]
    contents: dict[str, str]
    """By digest (`Capture.content`): the captured rank-local state (hexadecimal). States that the
    receiver is known to have are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStatesKept:
    """
    Answer of an agent to the message `LocalStates`: which captured rank-local states of the rank
    this agent has.

    `node`, `pid`, `rank`, `incarnation` and `number` are copied from the message that is answered.
    """

    keeper: int
    """The node whose agent sends this answer."""
    node: int
    pid: int
    rank: int
    incarnation: int
    number: int
    complete: bool
    """True if the answering agent has the states of all captures that the message lists."""
    contents: tuple[str, ...]
    """The digests (`Capture.content`) of the captured states that the answering agent has."""


# ---------------------------------------------------------------- orders to ranks
#
# Some fields are in all orders to ranks. By `epoch` (the number of the controller), `incident` and
# `round` (the attempt within the incident) a rank recognizes an order that arrives too late. `to`
# lists the ranks that carry out the order. `incarnations` says, by rank, which process of the rank
# carries out the order; a rank without an entry has its first process (incarnation 0). A process
# with another incarnation ignores the order. Such a process was given up but still runs, or is a
# successor that will take the rank over later.


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """
    Order to a rank: enter no update window from now on, and report the position in the training
    loop.

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

    If step `finish` is not done, the rank has `grace` seconds to finish this step, tail included.
    After that time the rank aborts collectives that still wait. In any case the rank leaves the
    loop and drops its process groups.
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

    The controller compares these digests with those of other ranks that hold the same shards.
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
    A rank from which a shard can be fetched, and the address of this rank.

    The rank holds the shard as it was at the step to which all ranks return, and the copy is sound.
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
    Order to a rank: restore the state of the end of `step` from the copy that the rank itself keeps
    in memory.
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
    Order to the ranks: form the process groups again. `name` names this set of groups.

    All ranks do this together, with the rendezvous store at `host`:`port`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    """The first step that will be computed with these groups. 0: the step is not known yet, because
    the ranks will find and load a checkpoint themselves (order `Reload`). If it turns out that the
    ranks will compute another step, they get a new order in a new round."""
    name: str
    """A name that no earlier set of process groups has had."""
    host: str
    port: int
    without: tuple[int, ...] = ()
    """The ranks that are not in the process groups, because the job continues without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """
    Order to the ranks: find the newest checkpoint that the user's program has written without tft,
    and load this checkpoint.

    All ranks do this together, after the process groups have been formed. In the answer
    (`Answered`), the field `held` is the step at whose end the checkpoint was saved.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    not_after: int | None = None
    """The last step whose checkpoint may be used, because checkpoints of later steps may be wrong.
    None: there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """
    Order to the ranks: build the framework's wrappers (such as DDP) again around the model that
    each rank now holds.

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
    Order to a rank: set the rank-local state, such as random generators and data position, to what
    it was at the end of `step`.
    """

    epoch: int
    incident: int
    round: int
    to: tuple[int, ...]
    incarnations: dict[int, int] = field(default_factory=dict)
    step: int
    skip: int = 0
    """The number of batches of training data to draw and drop after the rollback."""
    local_state: dict[int, str] = field(default_factory=dict)
    """By rank: the rank-local state (hexadecimal) that the rank's lost process had captured. The
    new process of the rank uses this state if the shared memory of its node does not contain the
    captured state."""
    derive: tuple[int, ...] = ()
    """The ranks that must compute their rank-local state from the step number, because they have
    not trained lately or their captured state is lost."""
    goes_back: bool = True
    """True if a rank may have completed a later step than `step`. Then there may be checkpoints of
    later steps, which the ranks must set aside. False: there are none, so the ranks carry out the
    order also while the file system with the checkpoints is not reachable."""


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
    """True if the rank must first call the user's functions that follow step `step` - 1
    (`session.after_step`) once more, because some rank may not have completed these calls."""
    tails: bool = False
    """True if some rank has reported that its loop marks the end of each step. Then no rank may
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

    The rank also writes rank-local state (RNG and data position): its own state if `writes_own` is
    True, and the state of the ranks in `local_state`.
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
    """By rank that cannot write its own rank-local state: this state (hexadecimal), which the
    receiver of the order writes instead."""


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
    Order to an agent: report the rank-local state of some ranks of a lost node, which the agent's
    node has kept. The agent answers with one `Recalled` for each rank in `ranks`.
    """

    epoch: int
    node: int
    """The node that has kept the rank-local state."""
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
    Order to one process: end. The controller does not accept this process, which has claimed to be
    the process of `rank`.
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
Message = Report | Order | Beat | Lead | AgentMessage | Inquire | Whereabouts | News

MESSAGES: tuple[type, ...] = (
    Joined, Ready, Faulted, Answered, Trained, Finished, Checkpointed, CheckpointFailed,
    NodeJoined, Spawned, Exited, StoreOpened, Recalled, NodeLost, StopRequested,
    PauseRequested, ResumeRequested, SwitchRequested, Noticed, Advised,
    Beat, Whereabouts, Lead, Inquire, News, LocalStates, LocalStatesKept,
    Freeze, Stop, Compare, Load, Fetch, Restore, Regroup, Reload, Rebuild, Rollback, Resume, Hold, Check,
    Release, Save, Commit, Complete, End,
    Spawn, Kill, Recall, EndNode, Refused,
)  # fmt: skip
"""The classes of all messages, in the order of `docs/reference/wire.md`. On the bus, a message is
sent with the name of its class as the field `kind`."""

ORDER_NAMES: dict[type[RankOrder], OrderName] = {
    Freeze: "freeze", Stop: "stop", Compare: "compare", Load: "load", Fetch: "fetch", Restore: "restore",
    Regroup: "regroup", Reload: "reload", Rebuild: "rebuild", Rollback: "rollback",
    Resume: "resume", Hold: "hold", Check: "check", Release: "release", Save: "save", Commit: "commit", Complete: "complete",
    End: "end",
}  # fmt: skip
"""By class of an order: the name of the order, which the answer to the order repeats
(`Answered.order`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """
    A message with the name of its job and its sender, in the form in which it is sent on the bus.

    `number` counts the reports of a sender from 1. It is 0 for a message whose number no receiver
    acknowledges: an order, or a status that is sent repeatedly, such as `Beat`.
    """

    job: str
    sender: str
    """The name of the sending process on the bus, for example `rank.3/1.4711` (rank, incarnation,
    pid), `node.0/3f9a2c51` (agent), `run.0/9b1c04de` (launcher), `controller/2` (epoch) or
    `ask.9f86d081` (a command of `tft`)."""
    number: int
    message: Message
