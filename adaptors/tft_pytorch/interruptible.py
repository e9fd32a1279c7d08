"""
Process groups of gloo whose waits can be cancelled.

When the connections of a group are cut (`sockets.py`), gloo raises an exception in nearly every
thread that waits for a message. gloo forgets two kinds of threads (`Pair::signalException` in
gloo/transport/tcp/pair.cc): a thread that has received a part of a message, and a thread that has
sent a part of a message. Such a thread sleeps until the time limit of the group, half an hour. Both
cases occur if a connection ends during a message, for example because the sender is killed.

So gloo carries out each operation, but this module waits for the operation in short slices. The
waiting thread can stop after any slice. `groups.py` later frees the group with its unfinished
operation.

`InterruptibleGloo` replaces the name `ProcessGroupGloo` in `torch.distributed.distributed_c10d`.
`init_process_group` and `new_group` make their groups by this name (written for torch 2.13). So the
user's own groups are interruptible too, and the backend is still called "gloo".
"""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # as torch.distributed has it
from torch.distributed import distributed_c10d
from torch.futures import Future

from tft.spi import TrainingFault

_SLICE = timedelta(milliseconds=20)
"""The length of one slice of a wait. Nearly all waits end within one slice, and are not delayed."""

_NO_LIMIT = timedelta(0)
"""The value with which torch says that a wait has no time limit of its own."""

_COLLECTIVES = (
    "_allgather_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather",
    "reduce", "scatter",
)  # fmt: skip
_BLOCKING = (
    "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource",
)  # fmt: skip

OPERATIONS = (*_COLLECTIVES, *_BLOCKING)
"""The methods of a process group that wait for other ranks."""


class CalledOff(TrainingFault, RuntimeError):
    """
    A wait for other ranks was cancelled.
    """

    def __init__(self) -> None:
        super().__init__(
            "the wait for other ranks of a process group was cancelled", kind="network"
        )


class _Waits:
    """
    The waits for the operations of one group.

    This object must not refer to the group, because gloo's threads call its methods. A gloo thread
    that dropped the last reference to its own group would wait for its own end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: set[Future[None]] = set()
        """The futures that are not set yet. Each is set once: when its operation is over, or when
        the wait is called off."""
        self.called_off = False

    def call_off(self) -> None:
        """
        Cancel all waits of the group, also waits that begin later.
        """
        with self._lock:
            self.called_off = True
            promised, self._promised = self._promised, set()
        for over in promised:
            over.set_result(None)

    def promise(self, native: Future[Any]) -> Future[Any]:  # Any: as torch has it
        """
        Return a future with the outcome of `native`. The future raises `CalledOff` if the waits are
        cancelled before `native` is done.
        """
        over: Future[None] = Future()

        def outcome(_: Future[None]) -> Any:  # Any: as in `native`
            if not native.done():
                raise CalledOff
            return native.value()  # or raises its error

        # If Python sets an exception on the future, C++ takes the exception for an ordinary result.
        # C++ sees an error only if the callback raises it, as `outcome` does.
        promised = over.then(outcome)
        with self._lock:
            self._promised.add(over)
            called_off = self.called_off
        native.add_done_callback(lambda _: self._settle(over))
        if called_off:
            self.call_off()
        return promised

    def _settle(self, over: Future[None]) -> None:
        with self._lock:
            if over not in self._promised:
                return
            self._promised.remove(over)
        over.set_result(None)


_on_failure: Callable[[BaseException], None] | None = None


def watch_failures(failed: Callable[[BaseException], None] | None) -> None:
    """
    Call `failed` with every exception that a collective raises when it is entered or waited for.

    None: stop these calls.
    """
    global _on_failure
    _on_failure = failed


def _tell(error: BaseException) -> None:
    if _on_failure is not None:
        _on_failure(error)


_all: "weakref.WeakSet[_Waits]" = weakref.WeakSet()
_all_lock = threading.Lock()


def install() -> None:
    """
    Make torch use `InterruptibleGloo` for its gloo groups from now on.
    """
    distributed_c10d.ProcessGroupGloo = InterruptibleGloo  # type: ignore[assignment,misc]  # on purpose


def remove() -> None:
    """
    Make torch use its own gloo groups again.
    """
    distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo  # type: ignore[misc]  # on purpose


def call_off() -> None:
    """
    Cancel all waits in the groups that exist now. A wait that has no result within 20 ms raises
    `CalledOff`. Later waits in these groups raise it too.

    Can be called on any thread.
    """
    with _all_lock:
        found = list(_all)
    for waits in found:
        waits.call_off()


class InterruptibleGloo(dist.ProcessGroup):
    """
    A gloo process group with interruptible waits. It takes the arguments of torch's
    `ProcessGroupGloo`, and behaves in the same way.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, **more: object
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for subclasses
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout, **more)
        self.options = gloo.options
        self._plain = dist.ProcessGroup(
            store, rank, size
        )  # the way torch itself calls its backends
        for group in (self._plain, self):
            group._register_backend(torch.device("cpu"), self.BackendType.GLOO, gloo)
            group._set_default_backend(self.BackendType.GLOO)
        self._waits = _Waits()
        with _all_lock:
            _all.add(self._waits)


class _Collective(dist.Work):
    """
    An operation that gloo's own threads carry out.
    """

    def __init__(self, native: dist.Work, waits: _Waits) -> None:
        super().__init__()
        self._native = native
        self._waits = waits

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        ends = monotonic() + timeout.total_seconds() if timeout else float("inf")
        try:
            while not self._ended(_SLICE):
                if self._waits.called_off:
                    raise CalledOff
                if monotonic() > ends:
                    raise RuntimeError("Operation timed out!")  # torch's own message
            return self._outcome()
        except Exception as error:
            _tell(error)
            raise

    def _ended(self, within: timedelta) -> bool:
        try:
            return self._native.wait(within)
        except RuntimeError:  # from the time limit, or from the operation, which will raise again
            return self._native.is_completed()

    def _outcome(self) -> bool:
        return self._native.wait()

    def get_future(self) -> Future[Any]:
        return self._waits.promise(self._native.get_future())

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._native.is_completed()

    def is_success(self) -> bool:
        return self._native.is_success()

    def exception(self) -> Any:  # Any: as torch has it
        return self._native.exception()

    def result(self) -> Any:  # Any: as torch has it
        return self._native.result()

    def source_rank(self) -> int:
        return self._native.source_rank()

    _source_rank = source_rank


class _Blocking(_Collective):
    """
    An operation for which a separate thread waits, because gloo cannot wait for it in slices.

    There are two kinds. If a wait for a message from rank to rank exceeds a time limit, gloo ends
    the whole group. A reduce-scatter consists of all-reduces of all data and of work after them.
    The waiting thread does this work, so gloo's wait can be called only once.
    """

    def __init__(self, native: dist.Work, waits: _Waits) -> None:
        super().__init__(native, waits)
        self._over = threading.Event()
        self._error: Exception | None = None
        self._waiter: threading.Thread | None = None

    def _ended(self, within: timedelta) -> bool:
        if self._waiter is None:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._waiter = threading.Thread(
                target=self._wait, args=modes, name="tft-waits", daemon=True
            )
            self._waiter.start()
        return self._over.wait(within.total_seconds())

    def _outcome(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, grad: bool, inference: bool) -> None:
        try:
            # The modes of the calling thread, since tensors are changed here: each thread has its
            # own modes.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                self._native.wait()  # does a part of the work, so it may be called only once
        except Exception as error:  # noqa: BLE001  # any exception goes to the waiting thread
            self._error = error
        finally:
            self._over.set()

    def is_completed(self) -> bool:
        return self._ended(timedelta())  # the operation goes on only while some thread waits for it


def _interruptible(name: str, work: type[_Collective]) -> Callable[..., dist.Work]:
    def operation(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> dist.Work:
        try:
            native = getattr(self._plain, name)(*args, **kwargs)
        except RuntimeError as error:  # exceptions of other types mean wrong arguments
            _tell(error)
            raise
        return work(native, self._waits)

    operation.__name__ = name
    return operation


for _name in _COLLECTIVES:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Collective))
for _name in _BLOCKING:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Blocking))
