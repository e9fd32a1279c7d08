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
    """The bytes: a flat view of format `B`. Writable if the buffer comes from `tft_take`."""


def _host_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuffer:
    """
    One named piece of the memory of a shard that is on a device. A transfer copies it to the host
    in parts, when they are requested. So the host needs memory for two parts only.
    """

    name: str
    size: int
    """In bytes."""
    copy: Callable[[int, memoryview], Callable[[], None]]
    """`copy(offset, into)` begins to copy the bytes from `offset` on into the host memory `into`,
    until it is full. The returned function waits until that is done. It is called on the threads of
    transfers."""
    host_memory: Callable[[int], memoryview] = _host_memory
    """Returns writable host memory of that many bytes, from which the device can copy fast."""

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
    """The name of the framework, for sentences."""
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    """The number of ranks that experts are spread over, of the dp * cp ranks of a dense group."""
    shards: int
    """The number of shards that the optimizer state of a dense group is cut into. 1: not cut."""
    threshold_kb: int = 0
    """Parameters smaller than this are not cut."""
    cuts_parameters: bool = False
    """True if parameters are cut together with their optimizer state."""
    experts_as_dense: bool = False
    """True if the state of experts is cut into as many shards as the dense state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """
    The objects that a user's factory makes, after the process groups have been formed.

    The factory is the argument `make` of `session.adopt`. This object is `session.model` until the
    process groups are lost.
    """

    model: Any  # Any: the framework's own types
    optimizer: Any
    scheduler: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Other objects with a state that tft keeps, by name, such as a moving average."""
    more: Any = None
    """Anything else that training needs from these groups, such as a pipeline schedule. tft keeps
    no state of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPayload:
    """
    The content of a shard for a transfer to another rank.

    `meta` is sent first, then the buffers.
    """

    meta: bytes
    """What the receiver must know before it can take the buffers, and all state that is not in
    tensors."""
    buffers: tuple[Buffer | DeviceBuffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """
    The result of a check on one rank.

    Raises `UsageError` if the verdict is unknown or the finding is not a text.
    """

    verdict: Verdict
    """`pass`: go on; `isolate`: take this rank's node out of the job; `end`: end the job."""
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
    """The kind of fault. None: a bug of the user, or a request for more memory than there is."""
    context_lost: bool = False
    """The device accepts no more work from this process: another process must replace it."""
    source: str = ""
    """The documentation or source code that says so."""

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
    """The norm of the reduced gradients before they were clipped. None: not known, or it is left to
    the script's own handling of overflows."""
    own: tuple[float, ...] = ()
    """More numbers that this rank has computed alone. They are compared with those of another
    attempt, and show whose device computes other numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """
    What an exception means for the job, if the kind of fault alone is not enough.
    """

    kind: FaultKind
    polluted: bool = False
    """The last update may have spread wrong numbers: no copy of that step is sound, on any rank."""
    not_after: int | None = None
    """The last sound step, if it is known: no copy of a later step is sound. None: not known."""
    context_lost: bool = False
    """The device accepts no more work from this process: another process must replace it."""


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
    """The step to whose end all ranks would return. None: the step of a checkpoint that the ranks
    find themselves."""
    leaving: tuple[int, ...]
    """For `scale_in`: the ranks that would leave the job."""
    joining: tuple[int, ...] = ()
    """For `scale_out`: the ranks that would come back."""
    replaced: tuple[int, ...] = ()
    """The living ranks that would get another process."""
    reload: bool = False
    """True if all ranks would load the newest checkpoint that they keep themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """
    The status of a rank while a strategy is chosen.
    """

    rank: int
    node: int | None
    """The node that the rank runs on, or ran on last; None: it has never had one."""
    member: bool
    """True if the rank takes part in the training."""
    alive: bool
    """True if the process of the rank takes orders."""
    held: int | None
    """The step whose whole state the rank has in use; None: there is no such state."""
    sound: bool
    """True if no fault has touched that state."""
    backups: tuple[int, ...]
    """Earlier steps of which the rank keeps a sound copy."""
    shards: tuple[str, ...]
    """The shards of which the rank holds a copy. Ranks with the same shard are replicas of it."""
    column: tuple[int, ...]
    """The ranks that can only leave and come back together with this rank (a model replica). Empty:
    the rank leaves alone."""
    unplaceable: str
    """Why no other process can be started for the rank. Empty: one can, or none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """
    An incident at the moment when all ranks have stopped and a strategy must be chosen.
    """

    number: int
    round: int
    faults: tuple[FaultView, ...]
    offers: tuple[OfferView, ...]
    """The strategies, in the order in which they would be tried."""
    ranks: tuple[RankView, ...]
    """All ranks of the job, also those that have left, in their order."""
    until: float
    """The time at which the strategy is chosen without advice (CLOCK_MONOTONIC of the controller,
    seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    The advice of a recovery plugin for one incident. All fields are optional.
    """

    strategy: str = ""
    """The strategy to follow: an offered strategy, or the plugin's own name for a variant of
    `base`."""
    base: str = ""
    """With a name of the plugin's own: the offered strategy of which it is a variant."""
    not_after: int | None = None
    """With a name of the plugin's own: return to this step or an earlier one."""
    skip: int = 0
    """With a name of the plugin's own: the number of batches to leave out after the rollback."""
    replace: tuple[int, ...] = ()
    """With a name of the plugin's own: ranks whose processes are replaced although they live."""
    veto: tuple[str, ...] = ()
    """Strategies that must not be used in this incident."""
    wait: float = 0.0
    """Seconds after which the plugin is asked again, before a strategy is chosen."""
    why: str = ""
    """The reason: a sentence for the operator."""


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
        True while a function runs that tft calls after a step; `step` is then the next step.
        """

    @property
    def run_dir(self) -> Path:
        """The run directory, in which this run keeps its records."""

    @property
    def incarnations(self) -> Mapping[int, int]:
        """The incarnation of each rank's process, as the last order said it. A rank that is not in
        it still has its first process."""


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
