"""
The devices on which the ranks compute. This is the only file of the adaptors that knows more than
the CPU.

CUDA, Ascend NPU and XPU compute asynchronously: a call puts work into a queue of the device (a
stream) and returns before the device has done the work. A collective on such a device does not fail
when it is aborted. It ends, the device takes it for a success, and its result is wrong.

torch offers the same functions for each kind of device (`torch.get_device_module`), and knows the
collective backend of each kind (nccl, hccl, xccl; `get_default_backend_for_device`). A package such
as torch_npu adds both for its device. So a new kind of device needs no code here.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, UsageError

log = structlog.get_logger()

_CPU = "cpu"
_GLOO = "gloo"

ABORT_LIMIT = 10.0
"""Seconds within which all groups of a process must be aborted. NCCL's abort takes milliseconds,
but can hang, and then the process has to be replaced."""

_ANSWER = 0.1
"""Seconds within which a device must say whether it has work to do. A device whose queue is full
does not answer: it has work to do."""

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "HCCL_ASYNC_ERROR_HANDLING": "0",
}
"""The environment variables of nccl and hccl that let a process survive the fault of another one.
With the defaults, a watchdog ends this process as soon as it sees an error of a communicator."""


_LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it gloo connects two ranks when they first send each other something. Without it each group
beside a group of devices would connect each rank with all others, in each incident."""


@dataclass(frozen=True, slots=True)
class Devices:
    """
    The devices on which this rank has its parameters and buffers.
    """

    kind: str = _CPU
    """The kind of device as torch names it, such as `cuda` or `npu`. `cpu`: all is on the CPU."""
    places: tuple[torch.device, ...] = (torch.device(_CPU),)
    """The devices of this kind, by index."""

    @property
    def backend(self) -> str:
        """
        The collective backend of this kind of device.
        """
        return dist.get_default_backend_for_device(self.kind)

    @property
    def asynchronous(self) -> bool:
        """
        Whether a call returns before its work is complete. On the CPU with gloo no call does.
        """
        return self.kind != _CPU or self.backend != _GLOO

    @property
    def backends(self) -> str:
        """
        The backends of the job's process groups, in the form of `init_process_group`.
        """
        return self.backend if self.kind == _CPU else f"cpu:{_GLOO},{self.kind}:{self.backend}"

    def synchronize(self) -> None:
        """
        Wait until the devices have done all their work, on all their streams.
        """
        for place in self.places:
            self._module.synchronize(place)

    def idle(self) -> bool:
        """
        Return whether the devices have no work to do. Can be called on any thread.

        A rank whose device waits for other ranks is not idle, whatever line its host has reached.
        """
        answers: list[bool] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the device is broken; its own error says so elsewhere
                answers.append(
                    all(self._module.current_stream(place).query() for place in self.places)
                )

        asked = threading.Thread(target=ask, name="tft-device-idle", daemon=True)
        asked.start()
        asked.join(_ANSWER)
        return answers == [True]

    # ------------------------------------------------------------ random generators

    def generators(self) -> list[bytes]:
        """
        Return the state of each device's random generator, by the index of the device. The CPU's
        generator is not among them.
        """
        return [self._module.get_rng_state(place).numpy().tobytes() for place in self._elsewhere]

    def restore_generators(self, states: Iterable[bytes]) -> None:
        """
        Restore the states that `generators` has returned, here or on another rank.

        Raises `OrderRefused` if the number of devices differs.
        """
        kept = list(states)
        if len(kept) != len(self._elsewhere):
            raise OrderRefused(
                f"the rank-local state has the generators of {len(kept)} devices, but this rank "
                f"has its parameters on {len(self._elsewhere)}"
            )
        for place, state in zip(self._elsewhere, kept, strict=True):
            self._module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), place)

    @property
    def _elsewhere(self) -> tuple[torch.device, ...]:
        return () if self.kind == _CPU else self.places

    @property
    def _module(self) -> Any:  # Any: the module of the device, such as torch.cuda
        return torch.get_device_module(self.kind)


def devices_of(tensors: Iterable[Tensor]) -> Devices:
    """
    Return the devices of these tensors. Tensors on the CPU do not count if others are elsewhere.

    Raises `UsageError` if the tensors are on devices of several kinds, or of a kind for which torch
    knows no collective backend.
    """
    found = {tensor.device for tensor in tensors}
    kinds = sorted({place.type for place in found} - {_CPU})
    if not kinds:
        return Devices()
    if len(kinds) > 1:
        raise UsageError(f"the model is on devices of several kinds: {', '.join(kinds)}")
    refused = unusable(kinds[0])
    if refused:
        raise UsageError(f"the model {refused}")
    places = sorted((each for each in found if each.type == kinds[0]), key=lambda d: d.index or 0)
    return Devices(kinds[0], tuple(places))


def unusable(kind: str) -> str:
    """
    Return why tensors on this kind of device cannot be recovered; empty if they can be.
    """
    if kind == _CPU:
        return ""
    if kind in distributed_c10d.Backend.default_device_backend_map:
        return ""
    return f"is on device {kind}, for which torch knows no collective backend"


def undisturbed() -> AbstractContextManager[None]:
    """
    Return a context that puts back the random generators of the CPU and of all devices.

    `torch.manual_seed` seeds the generators of all devices, so all of them are put back.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.random.fork_rng(devices=())
    places = range(torch.accelerator.device_count())
    return torch.random.fork_rng(devices=places, device_type=kind.type)


# ---------------------------------------------------------------- host memory


def host_memory(place: torch.device, size: int) -> memoryview:
    """
    Return writable host memory of `size` bytes, to which the device `place` copies fast.

    Pinned memory is taken while `place` is the current device: else torch would open a context on
    the first device of the node, in each process.
    """
    if place.type == _CPU:
        return memoryview(bytearray(size))
    return _pinned(place, (size,), torch.uint8).numpy().data


def host_tensor(like: Tensor) -> Tensor:
    """
    Return a contiguous tensor in host memory with the type and shape of `like`, to which the device
    of `like` copies fast. Its content is undefined.
    """
    if like.device.type == _CPU:
        return torch.empty(like.shape, dtype=like.dtype, device=_CPU)
    return _pinned(like.device, like.shape, like.dtype)


def _pinned(place: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    with torch.accelerator.device_index(place.index or 0):
        return torch.empty(tuple(shape), dtype=dtype, device=_CPU, pin_memory=True)


def copy_to_host(copies: Iterable[tuple[Tensor, Tensor]], devices: Devices) -> None:
    """
    Copy each first tensor into the second one, which is in host memory. Returns when all are
    copied. May be called on a thread of its own.

    On a device the copies have streams of their own, so that they do not wait for work that the
    training thread puts into its streams meanwhile. The devices must have done all work on which
    the content of the tensors depends.
    """
    pairs = list(copies)
    if not pairs:
        return
    with torch.no_grad(), ExitStack() as streams:
        own = [streams.enter_context(torch.Stream(place)) for place in devices._elsewhere]
        # One call, without the interpreter's lock: after each single call the thread would have to
        # wait until the training thread gives the lock up.
        torch._foreach_copy_([host for _, host in pairs], [t for t, _ in pairs], non_blocking=True)
        for stream in own:
            stream.synchronize()


def copier(flat: Tensor) -> Callable[[int, memoryview], Callable[[], None]]:
    """
    Return the function `copy` of a `DeviceBuffer` for a tensor of bytes, of one dimension.
    """

    def copy(offset: int, into: memoryview) -> Callable[[], None]:
        if not into.nbytes:
            return lambda: None
        host = torch.frombuffer(into, dtype=torch.uint8)
        host.copy_(flat[offset : offset + into.nbytes], non_blocking=True)
        if flat.device.type == _CPU:
            return lambda: None
        copied = torch.Event(flat.device)
        copied.record(torch.accelerator.current_stream(flat.device))
        return copied.synchronize

    return copy


# ---------------------------------------------------------------- process groups


def prepare_environment(devices: Devices) -> None:
    """
    Set the environment variables with which a process on an asynchronous device survives the faults
    of other ranks. Must be called before the first group is formed.

    A variable that the user has set to another value stays, and a warning names it.
    """
    if not devices.asynchronous:
        return
    os.environ.setdefault(_LAZY, "1")  # noqa: TID251  # torch reads it there
    for name, value in _ENVIRONMENT.items():
        present = os.environ.setdefault(name, value)  # noqa: TID251  # torch reads it there
        if present != value:
            log.warning(
                "backend_ends_process",
                variable=f"{name}={present}",
                why="with this value a fault of another rank can end this process or abort its groups",
                remedy=f"unset {name}, or set it to {value}",
            )


def tell_unseen(devices: Devices) -> None:
    """
    Print one line if training is about to begin on a kind of device on which this version was never
    run.
    """
    if devices.kind != _CPU:
        sys.stderr.write(
            f"tft: recovery on {devices.kind} devices was tested on a simulated device only: run "
            "`make test-accelerator` on such a machine (docs/explanation/devices.md)\n"
        )


def groups() -> list[dist.ProcessGroup]:
    """
    Return all process groups of this process, the newest first.
    """
    return list(reversed(distributed_c10d._world.pg_names))  # torch adds each new group at the end


def abort(aborted: Iterable[dist.ProcessGroup], devices: Devices) -> None:
    """
    Abort these groups, in this order. Returns when all are aborted, which may take a while.

    NCCL requires a group call around the aborts, else they can wait for each other (torch's issue
    119797).
    """
    with _group_call(devices):
        for group in aborted:
            with suppress(RuntimeError):  # the group may no longer exist
                group.abort()


@contextmanager
def _group_call(devices: Devices) -> Iterator[None]:
    backend: Any = None  # Any: the class of a backend; only NCCL's has group calls
    if dist.group.WORLD is not None:
        with suppress(RuntimeError):
            backend = dist.group.WORLD._get_backend(devices.places[0])
    if not hasattr(backend, "_group_start"):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def discard(devices: Devices) -> None:
    """
    Abort all groups, and remove them from torch's tables. No group is finalized, because that waits
    for collectives that never complete.

    Raises `OrderRefused` if the abort takes longer than `ABORT_LIMIT`.
    """
    if not within(ABORT_LIMIT, lambda: _discard(devices)):
        raise OrderRefused(
            f"the process groups could not be aborted within {ABORT_LIMIT:.0f} s, so this process "
            "cannot join other groups"
        )


def _discard(devices: Devices) -> None:
    abort(groups(), devices)
    with suppress(AssertionError):  # there is no default group
        distributed_c10d._abort_process_group()


def within(limit: float, call: Callable[[], None]) -> bool:
    """
    Call a function on a thread of its own, and return whether it has returned within `limit`
    seconds. If the function raises an exception in this time, raise that exception.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # the caller gets it
            errors.append(error)

    thread = threading.Thread(target=run, name="tft-abort", daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def sequence(devices: Devices) -> Mapping[dist.ProcessGroup, int] | None:
    """
    Return how many collectives each group has begun on the devices; None if a backend does not
    count them. Messages to single ranks are not among them.

    The backend of the devices is asked, not the group: a group with two backends may answer for
    gloo (torch's `_new_process_group_helper` knows nccl and backends of packages only).
    """
    try:
        return {
            group: _backend(group, devices)._get_sequence_number_for_group() for group in groups()
        }
    except RuntimeError:
        return None


def reported_error(devices: Devices) -> str:
    """
    Return the error that a communicator reports; empty if no communicator reports one.
    """
    for group in groups():
        with suppress(RuntimeError):
            backend = _backend(group, devices)
            error = backend.get_error() if hasattr(backend, "get_error") else None
            if error is not None and error.name != "SUCCESS":
                return f"the communicator of group {group.group_name} reports {error.name}"
    return ""


def _backend(group: dist.ProcessGroup, devices: Devices) -> Any:  # Any: backends differ in methods
    """
    Return the part of a group that works on the devices. A group that is written in Python has no
    parts, and is returned itself.
    """
    return group if type(group) is not dist.ProcessGroup else group._get_backend(devices.places[0])
