"""
The types of arguments and results of hooks, such as the content of shards (pieces of training
state), and read-only views of incidents and of a worker's session.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol, get_args

from tft.errors import UsageError
from tft.protocol.messages import FaultKind, StepWork, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """
    One named piece of a shard in host memory: contiguous bytes, which are the shard's own memory
    and not a copy of it where possible.
    """

    name: str
    view: memoryview
    """The bytes, as a flat view of format `B`. The view is writable if the buffer comes from
    `tft_take`."""

    @property
    def size(self) -> int:
        """
        The size in bytes.
        """
        return self.view.nbytes


def _host_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuffer:
    """
    One named piece of a shard in the memory of a device.

    A transfer to another rank copies the piece to the host in small parts, one after another. So
    the host needs memory for only two parts, and not for the whole piece. To compute digests, the
    piece is copied to the host in small parts, too.
    """

    name: str
    size: int
    """The size in bytes."""
    copy: Callable[[int, memoryview], Callable[[], None]]
    """`copy(offset, into)` begins to fill the host memory `into` with the bytes of this piece from
    `offset` on. It returns a function that waits until `into` is full. `copy` and the returned
    function are called on any thread, and on several threads at once."""
    host_memory: Callable[[int], memoryview] = _host_memory
    """Returns writable host memory of the given number of bytes, into which the device can copy
    fast (pinned memory)."""

    @property
    def view(self) -> memoryview:
        """
        A copy of all bytes in host memory.
        """
        content = self.host_memory(self.size)
        self.copy(0, content)()
        return content.toreadonly()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """
    The sizes of a job's parallelism, and how its framework divides the optimizer state among ranks.

    A function that reads a framework's job files returns this object. Such functions are registered
    under the entry points `tft.job_files`.
    """

    framework: str
    """The name of the framework, for messages."""
    dp: int
    """Data-parallel size."""
    tp: int
    """Tensor-parallel size."""
    pp: int
    """The number of pipeline stages."""
    cp: int
    """Context-parallel size."""
    ep: int
    """Expert-parallel size: the number of ranks over which experts are spread. They are among the
    dp * cp ranks that hold the same dense parameters."""
    shards: int
    """The number of shards into which the optimizer state is cut among the dp * cp ranks that hold
    the same dense parameters. 1: it is not cut."""
    threshold_kb: int = 0
    """Parameters smaller than this number of kilobytes are not cut, even if `cuts_parameters` is
    True."""
    cuts_parameters: bool = False
    """True if parameters are cut together with their optimizer state."""
    experts_as_dense: bool = False
    """True if the state of experts is cut into as many shards as the state of the dense part of the
    model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """
    The objects that a user's factory function makes, after the process groups have been formed.

    The factory is the argument `make` of `session.adopt`. Its result is available as
    `session.model` until an incident frees the process groups. When new process groups have been
    formed, the factory is called again.
    """

    model: Any  # Any: the framework's objects can have any class
    optimizer: Any
    scheduler: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Other objects whose state tft also keeps, such as a moving average, by name."""
    more: Any = None
    """Any other object that training needs and that uses these process groups, such as a pipeline
    schedule. tft does not keep its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """
    The content of a shard for a transfer to another rank.

    `meta` is sent first, then the buffers.
    """

    meta: bytes
    """A description of the buffers, with which the receiver can prepare memory for the buffers. It
    also contains all state that is not in tensors. Only the adaptor reads this field."""
    buffers: tuple[Buffer | DeviceBuffer, ...]


_UNUSED = count(1)
"""Yields numbers for `SliceContent.identity` that were never used before in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContent:
    """
    The content of a shard that must be equal on all ranks that hold the shard. While training, tft
    digests one slice of this content in each step.
    """

    head: bytes
    """All values that are not in tensors, such as settings and the state of schedulers."""
    buffers: tuple[Buffer | DeviceBuffer, ...]
    """The memory of the shard itself, not copies of it. The order and the sizes of the buffers are
    the same on all ranks that hold the shard."""
    identity: tuple[int, ...]
    """A number for each buffer, such as its address. The number changes if the buffer moves to
    other memory. As long as no number changes, tft may use this object for later steps, too."""

    @classmethod
    def of_one_step(cls, head: bytes, buffers: Iterable["Buffer | DeviceBuffer"]) -> "SliceContent":
        """
        Return content whose buffers tft must not read in later steps, for example because some of
        them are copies. Each buffer has a number that was never used before.
        """
        kept = tuple(buffers)
        return cls(head=head, buffers=kept, identity=tuple(next(_UNUSED) for _ in kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """
    The result of a check (`tft_check`) on one rank.

    Raises `UsageError` if the verdict is unknown or the finding is not a string.
    """

    verdict: Verdict
    """What is to happen: `pass`: the job continues; `isolate`: this rank's node is taken out of the
    job; `end`: the job ends."""
    finding: str = ""
    """The reason for a verdict that is not `pass`: a sentence on which an operator can act."""

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict) or not isinstance(self.finding, str):
            raise UsageError(
                f"a check returned the verdict {self.verdict!r} and the finding {self.finding!r}: "
                f"the verdict must be one of {', '.join(get_args(Verdict))}, and the finding a "
                "string"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """
    One line of the table of device faults: an error text, and the fault that the text indicates.

    Raises `UsageError` if the kind is unknown or `words` is not a regular expression.
    """

    words: str
    """A regular expression that is searched for in the message of a `RuntimeError`."""
    kind: FaultKind | None
    """The kind of fault that the error text indicates. None: the text does not indicate a fault of
    the device, but a bug in the script, or that the script needs more device memory than there is.
    """
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that another process must
    replace it."""
    source: str = ""
    """The place where the error text is documented: a web page, or a place in source code."""

    def __post_init__(self) -> None:
        if self.kind not in (None, *get_args(FaultKind)):
            kinds = ", ".join(get_args(FaultKind))
            raise UsageError(
                f"a device fault has the unknown kind {self.kind!r}: use one of {kinds}"
            )
        try:
            re.compile(self.words)
        except re.error as error:
            raise UsageError(
                f"the words of a device fault, {self.words!r}, are not a valid regular expression: "
                f"{error}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """
    The losses and gradient norms that a rank has computed in one step, before the update.
    """

    losses: tuple[float, ...] = ()
    """The losses of the step, one for each backward pass, in the order of the passes."""
    norm: float | None = None
    """The norm of the reduced gradients before they were clipped. NaN or Inf if gradients of further
    models or optimizers have it. None: the norm is not known, or it must not be judged because the
    script itself handles gradients that overflow."""
    own: tuple[float, ...] = ()
    """Other numbers that this rank has computed alone, before gradients were reduced. If the step
    is computed again and these numbers are then different, the device of this rank computes wrong
    numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """
    The kind of fault that an exception stands for, with further facts about the state. An adaptor
    returns a `Diagnosis` if the kind alone is not enough.
    """

    kind: FaultKind
    polluted: bool = False
    """True if the last update may have spread wrong numbers to all ranks. Then no copy of the state
    after that update is used, on any rank."""
    not_after: int | None = None
    """The last step whose state is not affected by the fault. No copy of the state after a later
    step is used. None: this step is not known."""
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that another process must
    replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultView:
    """
    One fault of an incident, as a plugin sees it.
    """

    kind: FaultKind
    rank: int | None
    """The rank at fault; None if no single rank could be identified."""
    step: int
    """The step that was being computed when the fault was noticed."""
    evidence: str
    """A text that says how the fault was noticed, such as the message of an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferView:
    """
    A strategy that the controller considers in an incident: what it would do, and whether it can be
    used.
    """

    strategy: str
    why: str
    """A sentence that says what the strategy would do."""
    why_not: str | None
    """The reason why the strategy cannot be used. None: the strategy can be used."""
    step: int | None
    """The step from whose end all ranks would continue. None: the step is not known yet, because
    the ranks would first look for a checkpoint and continue from its step."""
    leaving: tuple[int, ...]
    """For `scale_in`: the ranks that would leave the job."""
    joining: tuple[int, ...] = ()
    """For `scale_out`: the ranks that would come back to the job."""
    replaced: tuple[int, ...] = ()
    """The ranks that would get another process although their process is alive."""
    reload: bool = False
    """True if all ranks would load the newest checkpoint that the user's program has written
    without tft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """
    The status of a rank while a strategy is chosen.
    """

    rank: int
    node: int | None
    """The node on which the rank runs, or ran last. None: the rank never had a node."""
    member: bool
    """True if the rank takes part in the training."""
    alive: bool
    """True if the process of the rank can receive orders."""
    held: int | None
    """The step of the complete state that the rank has in use. None: the rank has no complete
    state."""
    sound: bool
    """True if no fault of the incident can have made the state of step `held` wrong."""
    backups: tuple[int, ...]
    """The earlier steps of which the rank keeps a sound copy in memory."""
    shards: tuple[str, ...]
    """The names of the shards of which the rank holds a copy."""
    column: tuple[int, ...]
    """The ranks of the model replica of this rank, which can leave the job and come back only
    together. Empty: the rank leaves alone."""
    unplaceable: str
    """The reason why no other process can be started for the rank. Empty: a process can be started,
    or none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """
    The status of one rank in a heartbeat of its node.
    """

    rank: int
    incarnation: int
    """The number of the rank's process: 0 for the first process, 1 for its replacement, and so on.
    """
    step: int
    """The last step that the rank has completed."""
    training: bool
    """True if the rank is inside the user's function `train`."""
    moved: float
    """The time when the training thread last made progress (CLOCK_MONOTONIC of the node, in
    seconds)."""
    work: tuple[StepWork, ...] = ()
    """The times of the steps that the rank has computed since its last heartbeat, at most
    32 of them. Empty if no plugin has asked for them (`SessionView.measure_work`)."""
    peers: tuple[int, ...] = ()
    """All ranks that do the same work as this rank, this rank included: those that hold a copy of a
    shard of this rank. Empty as long as the shards are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerJob:
    """
    The job whose values a logger gets (`tft run --log`).
    """

    job: str
    """The name of the job."""
    run_dir: Path
    """The run directory. When the job is resumed, the run directory stays the same."""
    directory: Path
    """A directory for files of this logger, for example with the id of its run. The directory
    exists already."""


class StepLogger(Protocol):
    """
    A logger to which the values of a job are sent. All methods are called on the same thread, in a
    process that does not train, so they may be slow. If a method raises an exception, the logger is
    opened again later, and gets again all values that were not flushed.
    """

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        """
        Take the values of a step. The script has logged them at the time `at` (seconds since 1970).

        Each step comes once, in ascending order, unless `again` is True. Then the values correct or
        complete earlier values of this step, and later steps may have come before.
        """
        raise NotImplementedError

    def flush(self) -> bool:
        """
        Store the values that were logged so far, so that they are not lost if this process is
        killed, and return True. These values are not sent again. If the logger can store them only
        in `close`, return False. If this process is then killed, the next process calls
        `last_step`, and sends all later steps again.
        """
        raise NotImplementedError

    def last_step(self) -> int | None:
        """
        Return the last step of which the logger has stored values. Return -1 if it has stored none,
        and None if this is not known. Called if an earlier process was killed, or an earlier logger
        has failed, before all values were flushed.
        """
        raise NotImplementedError

    def close(self, result: str) -> None:
        """
        Store all values, and close the logger. `result` says how the run has ended: `completed`,
        `dumped`, `failed`, `cancelled`, or empty if that is not known.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """
    Something that a plugin has found out about a job, and that an operator wants to know. A remark
    changes nothing in the job.
    """

    event: str
    """The name of the remark: a word of lower-case letters, digits and underscores, such as
    `rank_slow`. The hook `tft_on_event` gets it as an event."""
    facts: Mapping[str, object]
    """The details: numbers, texts, and lists of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """
    An incident at the moment when all ranks have stopped and a strategy must be chosen.
    """

    number: int
    """The number of the incident, from 1."""
    round: int
    """The round (attempt) of the incident. A fault that joins the incident starts a new round."""
    faults: tuple[FaultView, ...]
    offers: tuple[OfferView, ...]
    """The strategies that the controller considers, in the order in which the job would try them.
    """
    ranks: tuple[RankView, ...]
    """All ranks of the job, sorted by rank number, including ranks that have left the job."""
    until: float
    """The time (CLOCK_MONOTONIC on the controller's machine, seconds) until which the controller
    waits for advice. Then the controller chooses a strategy without advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    The advice of a recovery plugin for one incident. All fields are optional.
    """

    strategy: str = ""
    """The strategy to follow: an offered strategy, or a new name that the plugin gives to a variant
    of `base`. Empty: the plugin leaves the choice to tft."""
    base: str = ""
    """If `strategy` is a new name: the offered strategy of which it is a variant."""
    not_after: int | None = None
    """If `strategy` is a new name: all ranks return to the end of this step or of an earlier step.
    None: the plugin sets no limit."""
    skip: int = 0
    """If `strategy` is a new name: the number of batches to draw and drop after the return."""
    replace: tuple[int, ...] = ()
    """If `strategy` is a new name: ranks that get another process although their process is
    alive."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be used in this incident."""
    wait: float = 0.0
    """A time in seconds. The controller waits this long without choosing a strategy, and then asks
    the plugin again. 0: the controller does not wait."""
    why: str = ""
    """The reason for the advice: a sentence for the operator."""


class SessionView(Protocol):
    """
    The part of a worker's session that a plugin can read.
    """

    @property
    def rank(self) -> int:
        """
        The global rank of this process.
        """

    @property
    def incarnation(self) -> int:
        """
        The number of processes that held this rank before this process.
        """

    @property
    def world(self) -> int:
        """
        The number of ranks in the job (world size).
        """

    @property
    def step(self) -> int:
        """The step that is being computed, counted from 1."""

    @property
    def evaluating(self) -> bool:
        """
        True while tft calls a function of the user after a step, such as an evaluation. `step` is
        then already the next step.
        """

    @property
    def run_dir(self) -> Path:
        """The run directory, in which this run keeps its records."""

    @property
    def incarnations(self) -> Mapping[int, int]:
        """By rank: the incarnation of the rank's process, as the last order of the controller said.
        A rank that is missing still has its first process (incarnation 0)."""

    def compare_slices(self, of: int) -> None:
        """
        Cut each shard into `of` slices, which `digest_slice` digests one by one. A job whose
        adaptor cannot list the memory of shards (`tft_slices`) is then refused when its training
        begins.

        Call this method in the hook `tft_opened`.
        """

    def digest_slice(self, number: int) -> Callable[[], None] | None:
        """
        Digest one slice of every shard that several ranks hold, and send the digests to the
        controller, which compares them with those of the other holders.

        `number`, from 0, says which of the slices is digested (see `compare_slices`). Call this
        method in the hook `tft_on_step_ended`. If the result is None, the digests have been
        computed. If the slice is large, the result is a function that computes the digests. Call
        the function on any thread. It must return before the hook `tft_on_state_released` returns.
        """

    def measure_work(self) -> None:
        """
        Measure how long this rank works in each step, and send these times with the heartbeats.

        Call this method in the hook `tft_opened`. The hook `tft_on_beat` then gets the times
        (`RankBeat.work`), if the adaptor can measure them (`tft_watch_work`).
        """


class WorkMeter(Protocol):
    """
    Tells tft when a rank computes, and how long it waits. Its methods are called on the training
    thread, a few times in every step, so they must take a microsecond at most.
    """

    def step_begins(self) -> None:
        """Call the function `computing`, which the hook `tft_watch_work` was given, when the next
        forward pass begins."""

    def waited(self) -> float:
        """Return how many seconds the training thread has waited for other ranks so far, in this
        process."""
        raise NotImplementedError


class Guard(Protocol):
    """
    Watches the training state while a function of the user runs that must not change it, such as an
    evaluation. Its methods are called on the training thread.
    """

    def changed(self) -> Sequence[str]:
        """Return the names of parts of the state that differ from those before the call, such as
        `settings`. Called in every call, when the function has returned, so it must be quick. It
        need not look at the content of tensors."""
        raise NotImplementedError

    def written(self) -> bool:
        """Return True if the function has written to tensors of the state, even if their content is
        the same again, or is put back by `tft_clear`. Called when the function has ended, and again
        after `tft_clear` if an exception has left it."""
        raise NotImplementedError

    def end(self) -> None:
        """Drop copies and references, because the function has ended."""


class LauncherStore(Protocol):
    """
    The key-value store that a framework's own launcher (such as torchrun) serves for the processes
    that it starts.
    """

    def keep(self, key: str, words: str) -> str:
        """Store `words` under `key` if the key has no value yet. Return the value that is then
        stored: `words`, or the earlier value."""

    def put(self, key: str, words: str) -> None:
        """Store `words` under `key`, and overwrite an earlier value."""

    def take(self, key: str) -> str:
        """
        Wait for a value under `key`, remove the value from the store, and return it.
        """
