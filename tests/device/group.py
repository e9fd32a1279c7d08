"""
Process groups of the test device, which behave as torch documents those of NCCL.

- A collective returns at once. Its result is written later, on the stream.
- `wait` orders the stream, and does not hold the host. (Operations that torch itself reads on the
  host, without asking the device, are waited for. These are all but all-reduces and messages.)
- `abort` ends all pending work of this group, and of no other group. The stream takes the work for
  a success, and its result is incomplete. Later collectives of the group are refused.
- A collective whose peer has died does not end, until it is aborted.
- `shutdown` (which finalizes) waits for the pending work.
- With `TORCH_NCCL_ASYNC_ERROR_HANDLING=2`, an error of a collective aborts its group. With 0, it
  changes nothing. Otherwise it ends the process.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed imports it from here
from torch.distributed import distributed_c10d
from torch.futures import Future

from tests.device.stream import patch_torch, stream

NAME = "lagging"
_SLICE = 0.002
"""Seconds between two looks at a pending collective."""

_MESSAGES = frozenset({"recv", "send"})
"""The operations between two ranks. NCCL does not count them among its collectives."""

_STREAM_ONLY = frozenset({"allreduce", "allreduce_coalesced"}) | _MESSAGES
"""The operations that do not hold the host."""

_OPERATIONS = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "barrier", "broadcast", "recv", "reduce_scatter", "send",
)  # fmt: skip


class LaggingWork(dist.Work):
    """
    One collective in the queue of the stream.
    """

    def __init__(
        self, group: "LaggingGroup", begin: Callable[[], dist.Work], outputs: Any, *, polled: bool
    ) -> None:
        super().__init__()
        self._group, self._polled = group, polled
        self._begin: Callable[[], dist.Work] | None = begin
        self._outputs = outputs
        self._over = threading.Event()
        stream.submit(self._carry_out)

    def _carry_out(self) -> None:
        """
        Wait for the other ranks on the stream's thread, or until the group is aborted.
        """
        try:
            if self._group.aborted.is_set():
                self._spoil()
                return
            assert self._begin is not None
            inner = self._begin()
            is_completed = inner.is_completed if self._polled else waited(inner)
            while not is_completed():
                if self._group.aborted.wait(_SLICE):
                    self._spoil()
                    return
            if self._polled:
                inner.wait()  # raises the error of a collective that has failed
        except RuntimeError as error:
            self._group.failed(error)
            self._group.aborted.wait()
            self._spoil()
        finally:
            self._over.set()
            # `_begin` refers to the group, and the group to its pending work: break this cycle
            self._begin = None

    def _spoil(self) -> None:
        """
        Write a partial result, as a kernel leaves them that was aborted.
        """
        with torch.no_grad():
            for tensor in _tensors(self._outputs):
                flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
                flat[: len(flat) // 2 + 1] *= 3  # the factor changes integers as well

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """
        Order the stream behind the collective. The host goes on, except after operations whose
        results torch reads on the host.
        """
        if threading.current_thread().name != "device" and not self._group.lets_host_go_on:
            self._over.wait()
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        """
        Return a future that is done: futures of a device are ordered by the stream.
        """
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    def synchronize(self) -> None:
        self.wait()


class _HostWork(LaggingWork):
    """
    A collective that the host waits for.
    """

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._over.wait()
        return True


class LaggingGroup(dist.ProcessGroup):
    """
    A process group whose collectives are carried out by the stream. gloo carries the messages.
    """

    lets_host_go_on = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for subclasses
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.aborted = threading.Event()
        self._begun = 0
        self._pending: list[LaggingWork] = []

    def begin(self, name: str, *args: Any, **named: Any) -> dist.Work:
        """
        Put a collective into the queue of the stream.
        """
        if self.aborted.is_set():
            raise dist.DistBackendError(f"{NAME}: the communicator was aborted")
        self._begun += name not in _MESSAGES
        kind = LaggingWork if name in _STREAM_ONLY else _HostWork
        outputs = args[0] if args else []
        work = kind(
            self,
            lambda: getattr(self._gloo, name)(*args, **named),
            outputs,
            # a send or receive of gloo becomes complete only when a thread waits for it
            polled=name not in _MESSAGES,
        )
        self._pending = [each for each in self._pending if not each.is_completed()] + [work]
        return work

    def failed(self, error: RuntimeError) -> None:
        """
        React to the error of a collective as the environment says: abort, ignore it or end.
        """
        # the variable and the default of torch's NCCL groups
        handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        if handling == "2":
            self.abort()
        elif handling != "0":
            sys.stderr.write(f"{NAME}: taking the entire process down: {error}\n")
            sys.stderr.flush()
            os.abort()

    def abort(self) -> None:
        """
        End all pending work of this group. gloo is never freed: its destructor may wait for long, on
        whatever thread collects this object as garbage.
        """
        if not self.aborted.is_set():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))
        self.aborted.set()
        self._pending = []

    def shutdown(self) -> None:
        """
        Wait for the pending work.
        """
        for work in self._pending:
            work._over.wait()

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        pass

    def getBackendName(self) -> str:  # torch's name
        return NAME


def waited(inner: dist.Work) -> Callable[[], bool]:
    """
    Wait for work on a thread of its own, and return the function that tells whether it is complete
    and raises its error. gloo's messages can be waited for only once.
    """
    errors: list[RuntimeError] = []

    def wait() -> None:
        try:
            inner.wait()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="gloo-message", daemon=True)
    thread.start()

    def is_completed() -> bool:
        if not thread.is_alive() and errors:
            raise errors[0]
        return not thread.is_alive()

    return is_completed


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for each in found or () for tensor in _tensors(each)]


def _operation(name: str) -> Callable[..., dist.Work]:
    def operation(self: LaggingGroup, *args: Any, **named: Any) -> dist.Work:
        return self.begin(name, *args, **named)

    operation.__name__ = name
    return operation


for _name in _OPERATIONS:
    setattr(LaggingGroup, _name, _operation(_name))


def install() -> None:
    """
    Make torch use the device for CPU tensors, with these groups. Call it before `session.adopt`.
    """
    patch_torch()
    dist.Backend.register_backend(NAME, LaggingGroup, devices=["cpu"])
    distributed_c10d.Backend.default_device_backend_map["cpu"] = NAME
