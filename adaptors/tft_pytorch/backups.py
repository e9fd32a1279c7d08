"""
Keeps two or three copies of the whole state of this rank in host memory. Each copy has the state at
the end of an earlier step.

Most of the state, such as parameters and the state of the optimizer, changes only within update
windows. A separate thread copies this state while the next step computes forward and backward. The
rest of the state is small and may change at any time. The training thread copies this rest at once.
"""

import atexit
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import torch
from torch import Tensor

from tft.errors import OrderRefused
from tft.spi import Buffer, ShardPayload
from tft_pytorch.device import Devices, copy_to_host, host_tensor
from tft_pytorch.memory import offered

log = structlog.get_logger()

_ENDING = 60.0
"""The most seconds that the process waits, at its end, for a copy that is still being made. The
process waits because a process that ends during a copy may crash. The wait is limited because a
copy from a device that hangs never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInUse:
    """
    The present content of a shard. This content is about to be copied.
    """

    meta: bytes
    """The packed description of the shard, as it is sent to other ranks: its plain values, and the
    names, types and shapes of its tensors."""
    tensors: Mapping[str, Tensor]
    """The tensors in use, by name, in the order in which they are sent to other ranks."""
    lasting: Collection[str]
    """The names of the tensors that do not change before the next update window opens."""
    beside: Sequence[Buffer] = ()
    """Further buffers that are sent together with the shard: the modes of the modules (training or
    evaluation). The content of these buffers never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardCopy:
    meta: bytes
    tensors: Mapping[str, Tensor]
    beside: Sequence[Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    step: int
    shards: Mapping[str, _ShardCopy]


@dataclass(slots=True, eq=False)
class _Slot:
    """
    The host memory for one copy of this rank's state. The memory is used again for later copies.
    """

    copy: _Copy | None = None
    """The complete copy. None if the slot has no copy, or while its copy is being made."""
    memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """The tensors in host memory, by the name of the shard and the name of the tensor."""

    def make(self, step: int, shards: Mapping[str, ShardInUse], devices: Devices) -> "_Making":
        """
        Copy the tensors that may change before the next update window opens. Return a `_Making`,
        whose method `run` copies all other tensors.
        """
        old, self.memory = self.memory, {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for shard, each in shards.items():
            for name, tensor in each.tensors.items():
                known = old.pop((shard, name), None)
                if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                    known = host_tensor(tensor)
                self.memory[shard, name] = known
                pairs.append((tensor.detach(), known))
        old.clear()  # free the memory for tensors that the state no longer has
        named = [(name, each.lasting) for each in shards.values() for name in each.tensors]
        lasts = [name in lasting for name, lasting in named]
        at_once = [pair for pair, last in zip(pairs, lasts, strict=True) if not last]
        copy_to_host(at_once, devices)
        copy = _Copy(
            step=step,
            shards={
                shard: _ShardCopy(
                    meta=each.meta,
                    tensors={name: self.memory[shard, name] for name in each.tensors},
                    beside=each.beside,
                )
                for shard, each in shards.items()
            },
        )
        left = [pair for pair, last in zip(pairs, lasts, strict=True) if last]
        return _Making(slot=self, copy=copy, left=left, devices=devices)


@dataclass(slots=True, kw_only=True, eq=False)
class _Making:
    """
    A copy of this rank's state that is not complete yet.
    """

    slot: _Slot
    copy: _Copy
    left: list[tuple[Tensor, Tensor]]
    """The tensors that are still to be copied, each with its place in host memory."""
    devices: Devices
    complete: threading.Event = field(default_factory=threading.Event)
    """Set when the copy is complete or has failed. From then on the state in use may change."""
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [_version(tensor) for tensor, _ in self.left]

    def run(self) -> None:
        """
        Copy the tensors in `left`. Then put the complete copy into its slot.

        If the copying fails, or if a tensor was changed meanwhile, log a warning and leave the slot
        empty.
        """
        step = self.copy.step
        try:
            copy_to_host(self.left, self.devices)
            if [_version(tensor) for tensor, _ in self.left] == self.versions:
                self.slot.copy = self.copy
            else:
                why = "the script has changed the state outside of an update window"
                log.warning("backup_not_kept", step=step, why=why)
        except Exception as error:
            log.warning("backup_not_kept", step=step, why=str(error), exc_info=error)
        finally:
            # drop the references, so that the memory of the state in use can be freed
            self.left = []
            self.complete.set()


class Backups:
    """
    The copies of this rank's state in host memory. Its methods are called on the training thread,
    except where a method says otherwise.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._making: _Making | None = None
        self._work: queue.SimpleQueue[_Making] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def steps(self) -> tuple[int, ...]:
        """
        Return the numbers of the steps for which there is a complete copy of the state. Can be
        called on any thread.
        """
        return tuple(sorted(copy.step for slot in self._slots if (copy := slot.copy) is not None))

    def keep(
        self,
        step: int,
        shards: Callable[[], Mapping[str, ShardInUse]],
        devices: Devices,
        *,
        sound: int,
        copies: int,
    ) -> Callable[[], None] | None:
        """
        Begin a copy of the state at the end of `step`. Return a function that waits until the copy
        is complete. Return None if there is nothing to wait for.

        `shards` is a function that returns the state in use. `sound` is the last step at whose end
        the states of all ranks are known to be equal. `copies` is the number of copies to keep. If
        the copy cannot be made, log a warning: training goes on without the copy.
        """
        self.wait()
        self.drop_after(step - 1)
        slot = self._free_slot(sound, copies)
        if slot is None:
            why = (
                f"the copies of the steps {list(self.steps())} in host memory must all stay, "
                f"because the states of all ranks are known to be equal only up to step {sound}"
            )
            log.warning("backup_not_kept", step=step, why=why)
            return None
        slot.copy = None
        try:
            if devices.asynchronous:
                devices.synchronize()
            making = slot.make(step, shards(), devices)
        except Exception as error:  # for example, the host memory is used up
            log.warning("backup_not_kept", step=step, why=str(error), exc_info=error)
            return None
        if not self._has_thread():
            making.run()
            return None
        self._making = making
        self._work.put(making)
        return self.wait

    def wait(self) -> None:
        """
        Wait until the copy that is being made is complete, or has failed. Afterwards the state in
        use may be changed. Can be called on any thread.
        """
        making = self._making
        if making is not None:
            making.complete.wait()
            self._making = None

    def drop_after(self, step: int) -> None:
        """
        Drop the copies of steps later than `step`. The memory of these copies is kept for later
        copies.
        """
        self.wait()
        for slot in self._slots:
            if slot.copy is not None and slot.copy.step > step:
                slot.copy = None

    def give(self, shard: str, step: int) -> ShardPayload:
        """
        Return the copy of the shard `shard` at the end of `step`, in the form in which shards are
        sent to another rank. Can be called on any thread.

        Raises `OrderRefused` if there is no such copy.
        """
        copies = self._copy(step).shards
        if shard not in copies:
            raise OrderRefused(f"the backup in host memory of step {step} has no shard {shard!r}")
        buffers = [offered(name, tensor) for name, tensor in copies[shard].tensors.items()]
        return ShardPayload(meta=copies[shard].meta, buffers=(*buffers, *copies[shard].beside))

    def put_back(
        self,
        step: int,
        shards: Collection[str],
        room: Callable[[str, bytes], Mapping[str, Tensor]],
        settle: Callable[[str, bytes, Mapping[str, Tensor]], None],
    ) -> None:
        """
        Put the copy of `step` into the user's objects. The copy is kept.

        `shards` are the names of this rank's shards. `room` takes the name and the description of a
        shard, and returns the tensors for its content. `settle` makes the user's objects use these
        tensors. Raises `OrderRefused` if there is no copy of `step`, or if the copy does not fit
        the user's objects.
        """
        self.wait()
        copies = self._copy(step).shards
        if copies.keys() != set(shards):
            raise OrderRefused(
                f"the backup in host memory of step {step} has the shards {sorted(copies)}, but "
                f"this rank has {sorted(shards)}"
            )
        # Call the function `room` for all shards first, so that a copy that does not fit is refused
        # before any tensor is changed.
        rooms = {shard: dict(room(shard, copies[shard].meta)) for shard in shards}
        with torch.no_grad():
            for shard, tensors in rooms.items():
                for name, tensor in tensors.items():
                    tensor.copy_(copies[shard].tensors[name])
        for shard, tensors in rooms.items():
            settle(shard, copies[shard].meta, tensors)

    def _copy(self, step: int) -> _Copy:
        for slot in self._slots:
            copy = slot.copy
            if copy is not None and copy.step == step:
                return copy
        raise OrderRefused(
            f"this rank has no backup in host memory of step {step}; it has backups of the steps "
            f"{list(self.steps())}"
        )

    def _free_slot(self, sound: int, copies: int) -> _Slot | None:
        """
        Return the slot for the next copy: an empty slot, or the slot of the oldest copy.

        `sound` is the last step at whose end the states of all ranks are known to be equal. Return
        None if all slots are full and every copy but the oldest is later than step `sound`: then no
        copy may be dropped. The oldest copy is needed in case the newer copies differ between
        ranks. The newer copies are needed because another rank may know already that they are
        equal, and may have dropped its own oldest copy.
        """
        while len(self._slots) < copies:
            self._slots.append(_Slot())
        steps = self.steps()
        if len(steps) == len(self._slots) and steps[1] > sound:
            return None
        return min(self._slots, key=lambda slot: -1 if slot.copy is None else slot.copy.step)

    def _has_thread(self) -> bool:
        """
        Start the thread that makes the copies, if this thread does not run yet. Return False if the
        system cannot start another thread.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="tft-backups", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("backups_without_thread", why=str(error))
                return False
            self._thread = thread
            atexit.register(self._end)
        return True

    def _run(self) -> None:
        while True:
            self._work.get().run()

    def _end(self) -> None:
        making = self._making
        if making is not None:
            making.complete.wait(_ENDING)


def _version(tensor: Tensor) -> int:
    """
    Return how often the tensor was changed in place. Return 0 if torch does not count the changes
    of this tensor.
    """
    return 0 if tensor.is_inference() else tensor._version
