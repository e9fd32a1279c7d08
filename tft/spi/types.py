"""
The types of arguments and results of hooks: shards of training state, and views of incidents and
sessions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

from tft.errors import UsageError
from tft.protocol.messages import FaultKind, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """
    One named piece of the memory of a shard: contiguous bytes, without a copy where possible.
    """

    name: str
    view: memoryview
    """The bytes, as a flat view of format `B`. The view is writable if the buffer comes from
    `tft_take`."""


def _host_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuffer:
    """
    One named piece of the memory of a shard that is on a device. A transfer copies the piece to the
    host part by part, so the host needs memory for only two parts.
    """

    name: str
    size: int
    """The size in bytes."""
    copy: Callable[[int, memoryview], Callable[[], None]]
    """`copy(offset, into)` begins to fill the host memory `into` with the bytes from `offset` on.
    The returned function waits until `into` is full. Both are called on the threads of transfers.
    """
    host_memory: Callable[[int], memoryview] = _host_memory
    """Returns writable host memory of the given number of bytes, from which the device can copy
    fast."""

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
    tp: int
    pp: int
    cp: int
    ep: int
    """The number of ranks over which experts are spread, out of the dp * cp ranks of a dense
    data-parallel group."""
    shards: int
    """The number of shards into which the optimizer state of a dense data-parallel group is cut. 1:
    it is not cut."""
    threshold_kb: int = 0
    """A size in kilobytes. Parameters that are smaller stay whole, even if others are cut."""
    cuts_parameters: bool = False
    """True if parameters are cut together with their optimizer state."""
    experts_as_dense: bool = False
    """True if the state of experts is cut into as many shards as the state of the dense part of the
    model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """
    The objects that a user's factory makes, after the process groups have been formed.

    The factory is the argument `make` of `session.adopt`. This object is `session.model` until the
    process groups are lost.
    """

    model: Any  # Any: objects of the framework, of any class
    optimizer: Any
    scheduler: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Other objects whose state tft keeps, by name, such as a moving average."""
    more: Any = None
    """Any other object that training needs and that uses these groups, such as a pipeline schedule.
    tft keeps no state of this object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """
    The content of a shard for a transfer to another rank.

    `meta` is sent first, then the buffers.
    """

    meta: bytes
    """The description that the receiver needs before it can receive the buffers, and all state that
    is not in tensors."""
    buffers: tuple[Buffer | DeviceBuffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContent:
    """
    The content of a shard that must be equal on all ranks that hold the shard, for digests of
    slices.
    """

    head: bytes
    """All values that are not in tensors, such as settings and the state of schedulers."""
    buffers: tuple[Buffer | DeviceBuffer, ...]
    """The memory of the shard, not copies, in the same order and with the same sizes on every
    rank."""
    identity: tuple[int, ...]
    """For each buffer a number that changes when the buffer moves to another place in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """
    The result of a check on one rank.

    Raises `UsageError` if the verdict is unknown or the finding is not a text.
    """

    verdict: Verdict
    """`pass`: continue; `isolate`: take this rank's node out of the job; `end`: end the job."""
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
    """A regular expression, searched in the message of a `RuntimeError`."""
    kind: FaultKind | None
    """The kind of fault. None: the error is no fault of the device, but a bug of the user, or a
    request for more memory than the device has."""
    context_lost: bool = False
    """True if the device accepts no more work from this process, so that another process must
    replace it."""
    source: str = ""
    """The documentation or source code that contains the error text."""

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
    What a rank has computed in one step, before the update.
    """

    losses: tuple[float, ...] = ()
    """The values from which the backward passes of the step began, in their order."""
    norm: float | None = None
    """The norm of the reduced gradients before they were clipped. None: the norm is not known, or
    the script itself handles an overflow of the gradients, for example with a loss scaler."""
    own: tuple[float, ...] = ()
    """More numbers that this rank has computed alone. If another attempt at the step gives other
    numbers on one rank, the device of that rank computes wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """
    What an exception means for the job. The hook `tft_classify` returns a diagnosis if the kind of
    fault alone does not say enough.
    """

    kind: FaultKind
    polluted: bool = False
    """True if the last update may have spread wrong numbers: no copy of that step is sound, on any
    rank."""
    not_after: int | None = None
    """The last step whose state is sound: copies of later steps are not sound. None: not known."""
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
    """The step that was being computed."""
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferView:
    """
    A strategy that the controller offers in an incident, with the reasons for and against it.
    """

    strategy: str
    why: str
    """A sentence that says what the strategy would do."""
    why_not: str | None
    """The reason why the strategy cannot be used; None: it can be used."""
    step: int | None
    """The step from whose end all ranks would continue. None: the step of a checkpoint that the
    ranks find themselves."""
    leaving: tuple[int, ...]
    """For `scale_in`: the ranks that would leave the job."""
    joining: tuple[int, ...] = ()
    """For `scale_out`: the ranks that would come back to the job."""
    replaced: tuple[int, ...] = ()
    """The ranks with a living process that would get another process."""
    reload: bool = False
    """True if all ranks would load the newest checkpoint that they write without tft."""


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
    """The step of the complete state with which the rank trains. None: the rank has no complete
    state."""
    sound: bool
    """True if no fault has touched that state."""
    backups: tuple[int, ...]
    """The earlier steps of which the rank keeps a sound copy in memory."""
    shards: tuple[str, ...]
    """The shards of which the rank holds a copy. Ranks with the same shard are replicas of it."""
    column: tuple[int, ...]
    """The ranks of the model replica of this rank, which can leave the job and come back only
    together. Empty: the rank leaves alone."""
    unplaceable: str
    """Why no other process can be started for the rank. Empty: one can be started, or none is
    needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """
    An incident at the moment when all ranks have stopped and a strategy must be chosen.
    """

    number: int
    round: int
    faults: tuple[FaultView, ...]
    offers: tuple[OfferView, ...]
    """The strategies, in the order in which the job would try them."""
    ranks: tuple[RankView, ...]
    """All ranks of the job, including those that have left, by rank number."""
    until: float
    """The time at which the strategy is chosen without advice (CLOCK_MONOTONIC of the controller,
    seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    The advice of a recovery plugin for one incident. All fields are optional.
    """

    strategy: str = ""
    """The strategy to follow: one that was offered, or a new name of the plugin for a variant of
    `base`. Empty: the plugin leaves the choice to tft."""
    base: str = ""
    """If `strategy` is a new name of the plugin: the offered strategy of which it is a variant."""
    not_after: int | None = None
    """If `strategy` is a new name of the plugin: the latest step to which the ranks may return."""
    skip: int = 0
    """If `strategy` is a new name of the plugin: the number of batches to skip after the rollback.
    """
    replace: tuple[int, ...] = ()
    """If `strategy` is a new name of the plugin: the ranks to get a new process although their
    present process is alive."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be used in this incident."""
    wait: float = 0.0
    """Seconds after which the plugin is asked again. No strategy is chosen before. 0: the plugin
    needs no more time."""
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
        """The number of processes that held this rank before this one."""

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
        True while tft calls a function of the user after a step. `step` is then already the number
        of the next step.
        """

    @property
    def run_dir(self) -> Path:
        """The run directory, in which this run keeps its records."""

    @property
    def incarnations(self) -> Mapping[int, int]:
        """The incarnation of each rank's process, according to the last order of the controller. A
        rank that is missing in the mapping still has its first process (incarnation 0)."""

    def digest_slice(self, number: int, of: int) -> Callable[[], None] | None:
        """
        Digest slice `number` of `of` slices of every shard that several ranks hold, and send the
        digests to the controller, which compares them.

        Call this method in `tft_on_step_ended`. If the slice is small, it is digested at once, and
        the result is None. If the slice is large, the result is a function that digests it. Call
        that function on any thread; it must have returned before `tft_on_state_released` returns.
        """


class LauncherStore(Protocol):
    """
    The store that a framework's own launcher serves for the processes it starts.
    """

    def keep(self, key: str, words: str) -> str:
        """Store `words` under `key` if the key has no value yet. Return the stored value."""

    def put(self, key: str, words: str) -> None:
        """Store `words` under `key`, and overwrite an earlier value."""

    def take(self, key: str) -> str:
        """Wait for a value under `key`, remove it from the store, and return it."""
