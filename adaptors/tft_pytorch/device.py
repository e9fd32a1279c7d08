"""
The devices on which the ranks compute. Apart from checks whether a tensor is on the CPU, no other
file of the adaptors has code that depends on the kind of device.

CUDA, Ascend NPU and XPU compute asynchronously: a call puts work into a queue of the device (a
stream) and returns before the device has done the work. A collective on such a device raises no
error when it is aborted. The device treats the collective as complete, but the result of the
collective is wrong.

torch has the same functions for each kind of device (`torch.get_device_module`), and knows the
collective backend of each kind: nccl, hccl or xccl (`get_default_backend_for_device`). A package
such as torch_npu adds the functions and the backend for its device. So a new kind of device needs
no code here.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, UsageError
from tft_pytorch.tensor_metadata import byte_tensor

log = structlog.get_logger()

_CPU = "cpu"
_GLOO = "gloo"
_NCCL = "nccl"

ABORT_LIMIT = 10.0
"""Seconds within which all groups of a process must be aborted. NCCL's abort takes half a second. An
abort can also hang, and then the process must be replaced."""

_ANSWER = 0.1
"""Seconds within which a device must answer whether it has work to do. A device that does not
answer has a full queue, so it has work to do."""

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "HCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Environment variables of nccl and hccl. With these values a process survives the fault of another
rank. With the default values, a watchdog of nccl or hccl ends the process as soon as it sees an
error of a communicator."""


_LAZY = "TORCH_GLOO_LAZY_INIT"
"""The environment variable that makes gloo connect two ranks only when they first send something to
each other. Without this variable, every gloo group that accompanies a group of nccl or hccl would
connect each rank with all other ranks, in each incident."""


@dataclass(frozen=True, slots=True)
class Devices:
    """
    The devices on which this rank has its parameters and buffers.
    """

    kind: str = _CPU
    """The kind of device by torch's name, such as `cuda` or `npu`. The kind is `cpu` if all
    parameters and buffers are on the CPU."""
    places: tuple[torch.device, ...] = (torch.device(_CPU),)
    """The devices of this kind, in the order of their indices."""

    @property
    def backend(self) -> str:
        """
        The collective backend of this kind of device, such as `nccl`.
        """
        return dist.get_default_backend_for_device(self.kind)

    @property
    def blocks_in_accept(self) -> bool:
        """
        True if the backend, while it makes a communicator, waits without a limit for other ranks
        that connect to its listening sockets. NCCL does.
        """
        return self.backend == _NCCL

    @property
    def asynchronous(self) -> bool:
        """
        True if a call of torch returns before the device has done the work of the call. False for
        the CPU with gloo.
        """
        return self.kind != _CPU or self.backend != _GLOO

    @property
    def backends(self) -> str:
        """
        The backends of the job's process groups, in the form that `init_process_group` takes.
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

        A device that waits for other ranks in a collective is not idle, even if the Python code of
        its rank has continued.
        """
        return self.answer() is True

    def at_rest(self) -> bool:
        """
        Return whether the work in the current streams of the calling thread is done, so that the
        results of this work can be read without a wait.
        """
        # a device that reports an error here reports it again in the call that reads from the
        # device, so the error can be ignored here
        with suppress(RuntimeError):
            return all(self._module.current_stream(place).query() for place in self._elsewhere)
        return False

    def answer(self) -> bool | None:
        """
        Return whether the devices have no work to do, or None if they do not answer in time. Can be
        called on any thread.
        """
        answers: list[bool] = []

        def ask() -> None:
            # ignored here, because the training loop meets the error of a lost device too
            with suppress(RuntimeError):
                answers.append(
                    all(self._module.current_stream(place).query() for place in self.places)
                )

        asked = threading.Thread(target=ask, name="tft-device-idle", daemon=True)
        asked.start()
        asked.join(_ANSWER)
        return answers[0] if answers else None

    # ------------------------------------------------------------ random generators

    def generators(self) -> list[bytes]:
        """
        Return the states of the devices' random generators, in the order of the device indices. The
        state of the CPU's generator is not in the list.
        """
        return [self._module.get_rng_state(place).numpy().tobytes() for place in self._elsewhere]

    def restore_generators(self, states: Iterable[bytes]) -> None:
        """
        Restore the states of random generators that the method `generators` has returned, on this
        rank or on another rank.

        Raises `OrderRefused` if `states` comes from a rank with another number of devices.
        """
        kept = list(states)
        if len(kept) != len(self._elsewhere):
            raise OrderRefused(
                f"the rank-local state to restore has the random generators of {len(kept)} "
                f"devices, but this rank has its parameters on {len(self._elsewhere)} devices"
            )
        for place, state in zip(self._elsewhere, kept, strict=True):
            self._module.set_rng_state(byte_tensor(state), place)

    @property
    def _elsewhere(self) -> tuple[torch.device, ...]:
        return () if self.kind == _CPU else self.places

    @property
    def _module(self) -> Any:  # Any: a module of torch, such as torch.cuda
        return torch.get_device_module(self.kind)


def devices_of(tensors: Iterable[Tensor]) -> Devices:
    """
    Return the devices on which these tensors are. Tensors on the CPU are ignored if other tensors
    are on another kind of device.

    Raises `UsageError` if the tensors are on devices of several kinds, or of a kind for which torch
    knows no collective backend.
    """
    found = {tensor.device for tensor in tensors}
    kinds = sorted({place.type for place in found} - {_CPU})
    if not kinds:
        return Devices()
    if len(kinds) > 1:
        raise UsageError(
            f"the model is on devices of several kinds: {', '.join(kinds)}. Move the whole model "
            "to devices of one kind"
        )
    refused = unusable(kinds[0])
    if refused:
        raise UsageError(f"the model {refused}")
    places = sorted((each for each in found if each.type == kinds[0]), key=lambda d: d.index or 0)
    return Devices(kinds[0], tuple(places))


def unusable(kind: str) -> str:
    """
    Return why tft cannot recover tensors on this kind of device, as words that follow the name of
    the tensor or the model in a message. Return an empty text if tft can recover such tensors.
    """
    if kind == _CPU:
        return ""
    if kind in distributed_c10d.Backend.default_device_backend_map:
        return ""
    return f"is on device {kind}, for which torch knows no collective backend"


def select() -> None:
    """
    Make the device whose index is in the variable `LOCAL_RANK` the current one, as torch's
    `DeviceMesh` does when it is made. Do nothing if the script has chosen or used a device already.

    Called before a trial call of the user's factory, which runs over groups that send nothing. A
    mesh over such groups does not choose a device. So without this function, the first tensors of
    all ranks would be on the first device of the node. A later mesh would not choose another
    device either, because the process already uses one.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or torch.get_device_module(kind.type).is_initialized():
        return
    told = os.environ.get("LOCAL_RANK", "")  # noqa: TID251  # torch reads this variable
    # a rank that sees only its own device has device 0, whatever its number on the node
    if told.isdecimal() and int(told) < torch.accelerator.device_count():
        torch.accelerator.set_device_index(int(told))


def undisturbed() -> AbstractContextManager[None]:
    """
    Return a context manager that restores, at its end, the random generators of the CPU and of all
    devices.

    All devices are included because `torch.manual_seed` seeds the generators of all devices.
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

    If `place` is not the CPU, the memory is pinned. The pinned memory is allocated while `place` is
    the current device: otherwise each process would open a context on the first device of the node.
    """
    if place.type == _CPU:
        return memoryview(bytearray(size))
    return _pinned(place, (size,), torch.uint8).numpy().data


def host_tensor(like: Tensor) -> Tensor:
    """
    Return a contiguous tensor in host memory with the type and shape of `like`, to which the device
    of `like` copies fast. The content of the new tensor is undefined.
    """
    if like.device.type == _CPU:
        return torch.empty(like.shape, dtype=like.dtype, device=_CPU)
    return _pinned(like.device, like.shape, like.dtype)


def _pinned(place: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    with torch.accelerator.device_index(place.index or 0):
        return torch.empty(tuple(shape), dtype=dtype, device=_CPU, pin_memory=True)


def copy_to_host(copies: Iterable[tuple[Tensor, Tensor]], devices: Devices) -> None:
    """
    For each pair in `copies`, copy the first tensor into the second, which is in host memory.
    Return when all copies are complete. Can be called on any thread.

    Copies from a device use separate streams, so that the copies do not wait for work that the
    training thread puts into its own streams meanwhile. Before the call, the devices must have done
    all work on which the content of the tensors depends.
    """
    pairs = list(copies)
    if not pairs:
        return
    with torch.no_grad(), ExitStack() as streams:
        own = [streams.enter_context(torch.Stream(place)) for place in devices._elsewhere]
        # Copy all tensors in one call, which releases Python's global lock. With many calls, this
        # thread would wait after each call until the training thread releases the lock.
        torch._foreach_copy_([host for _, host in pairs], [t for t, _ in pairs], non_blocking=True)
        for stream in own:
            stream.synchronize()


def copier(flat: Tensor) -> Callable[[int, memoryview], Callable[[], None]]:
    """
    Return the function `copy` of a `DeviceBuffer`, which is a buffer whose content is on a device.
    The tensor `flat` has this content: it has one dimension, and its elements are bytes.

    `copy` begins to copy bytes of `flat`, from an offset on, into host memory. It returns a
    function that waits until they are copied.
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

    A variable that the user has set to another value stays, and a warning names the variable.
    """
    if not devices.asynchronous:
        return
    os.environ.setdefault(_LAZY, "1")  # noqa: TID251  # torch reads this variable
    for name, value in _ENVIRONMENT.items():
        present = os.environ.setdefault(name, value)  # noqa: TID251  # torch reads this variable
        if present != value:
            log.warning(
                "backend_ends_process",
                variable=f"{name}={present}",
                why="with this value a fault of another rank can end this process or abort its "
                "groups",
                remedy=f"unset {name}, or set it to {value}",
            )


def tell_unseen(devices: Devices) -> None:
    """
    Print a warning if training is about to begin on a kind of device on which little of tft was
    tested.
    """
    if devices.kind != _CPU:
        sys.stderr.write(
            f"tft: recovery on {devices.kind} devices was tested on a simulated device and on one "
            "GPU only: run `make test-accelerator` on yours (docs/explanation/devices.md)\n"
        )


def groups() -> list[dist.ProcessGroup]:
    """
    Return all process groups of this process.
    """
    return list(distributed_c10d._world.pg_names)


def abort(aborted: Iterable[dist.ProcessGroup]) -> None:
    """
    Abort the groups `aborted`, all at the same time. Return when all of them are aborted, which may
    take seconds.

    The abort of a group waits until the device has left the group's collectives. These may wait in
    the queue of the device for a collective of another group, which ends only when that group is
    aborted. NCCL's group call cannot abort groups together here, because torch aborts on a thread
    of its own (torch issue 119797).
    """
    begun, rest = [], []
    for group in aborted:
        thread = threading.Thread(target=_abort, args=(group,), name="tft-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            rest.append(group)
        else:
            begun.append(thread)
    for group in rest:
        _abort(group)
    for thread in begun:
        thread.join()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # the process group may be destroyed already
        group.abort()


def discard(devices: Devices) -> None:
    """
    Abort all process groups, and remove them from torch's tables. No group is shut down in the
    ordinary way, because an ordinary shutdown would wait for collectives that never complete.

    Raises `OrderRefused` if the abort takes longer than `ABORT_LIMIT`.
    """
    if not within(ABORT_LIMIT, lambda: _discard(devices)):
        raise OrderRefused(
            f"the process groups could not be aborted within {ABORT_LIMIT:.0f} s, so this process "
            "cannot join other groups"
        )


def _discard(devices: Devices) -> None:
    abort(groups())
    with suppress(AssertionError):  # torch raises AssertionError if there is no default group
        distributed_c10d._abort_process_group()


def within(limit: float, call: Callable[[], None]) -> bool:
    """
    Call `call` on a new thread, and return whether `call` has returned within `limit` seconds. If
    `call` raises an exception within this time, raise the same exception.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # raised again for the caller of `within`
            errors.append(error)

    thread = threading.Thread(target=run, name="tft-abort", daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        # take the error out of `errors`: its traceback refers to this frame, and so to `errors`,
        # and such a cycle of references would keep alive all that the frames refer to
        raise errors.pop()
    return not thread.is_alive()


def sequence(devices: Devices) -> Mapping[dist.ProcessGroup, int] | None:
    """
    Return how many collectives each group has begun on the devices. Messages to single ranks do not
    count. Return None if a backend does not count its collectives.

    Each number is read from the group's backend for the devices, not from the group itself. A group
    that has two backends may return the number of its gloo backend, because torch's
    `_new_process_group_helper` selects the right backend only for nccl and for backends of
    packages.
    """
    try:
        return {
            group: _backend(group, devices)._get_sequence_number_for_group() for group in groups()
        }
    except RuntimeError:
        return None


def flight_record() -> Mapping[str, Any]:
    """
    Return what torch's flight recorder has noted about the collectives on the devices that are not
    complete, in the form of torch. Return an empty mapping if this torch has no flight recorder for
    devices.
    """
    # only a torch that has NCCL has this function
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    record: Mapping[str, Any] = json.loads(dump(includeCollectives=True, onlyActive=True))
    return record


def reported_error(devices: Devices) -> str:
    """
    Return the error that one of the communicators on the devices reports. Return an empty text if
    no communicator reports an error.
    """
    for group in groups():
        with suppress(RuntimeError):
            backend = _backend(group, devices)
            error = backend.get_error() if hasattr(backend, "get_error") else None
            if error is not None and error.name != "SUCCESS":
                return f"the communicator of group {group.group_name} reports {error.name}"
    return ""


# Any: the backends have no common base class
def _backend(group: dist.ProcessGroup, devices: Devices) -> Any:
    """
    Return the backend of a group for the devices. A group whose class is written in Python has no
    separate backends. For such a group, return the group itself.
    """
    return group if type(group) is not dist.ProcessGroup else group._get_backend(devices.places[0])
