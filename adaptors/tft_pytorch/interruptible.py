"""
gloo's process groups, with waits that can be called off.

Cutting the connections of a group (`sockets.py`) makes gloo raise in whoever waits for a message, with
two exceptions, which it forgets (`Pair::signalException` in gloo/transport/tcp/pair.cc): who has
received a message in part, and who has sent one in part. Nothing wakes these before the time limit of
the group, half an hour. They come about whenever a connection ends while a message is on its way, as
it does when its sender is killed. So here the operation is gloo's, but it is waited for in slices, and
between two of them a thread may leave. What it leaves behind, `groups.py` lets go of.

It takes the place of the name `ProcessGroupGloo` in `torch.distributed.distributed_c10d`, from where
`init_process_group` and `new_group` make their groups (written for torch 2.13): the user's own groups
are interruptible too, and the backend is called "gloo" as ever.
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

_SLICE = timedelta(milliseconds=20)
"""Of a wait. A wait that ends within it, as nearly all do, is not held up by anything."""

_NO_LIMIT = timedelta(0)
"""How torch writes that a wait has no time limit of its own."""

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


class CalledOff(RuntimeError):
    """
    A wait for other ranks was called off.
    """

    tft_fault_kind = "network"

    def __init__(self) -> None:
        super().__init__("the wait for other ranks of a process group was called off")


class _Waits:
    """
    Those in one group. It knows nothing of the group itself: gloo's threads call in here, and one that
    was the last to let go of its group would have to wait for its own end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: set[Future[None]] = set()
        """Each to be set once: when what is waited for is over, or called off."""
        self.called_off = False

    def call_off(self) -> None:
        """
        End all of them, and those that come.
        """
        with self._lock:
            self.called_off = True
            promised, self._promised = self._promised, set()
        for over in promised:
            over.set_result(None)

    def promise(self, native: Future[Any]) -> Future[Any]:  # Any: as torch has it
        """
        A future with the outcome of `native`, unless the wait is called off before.
        """
        over: Future[None] = Future()

        def outcome(_: Future[None]) -> Any:  # Any: as in `native`
            if not native.done():
                raise CalledOff
            return native.value()  # or its error

        # An exception that is set in Python is none for C++, which reads it as the result. One that
        # is raised here is.
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
    Call this with what a collective raises, where it is entered or waited for; None: no more.
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
    From here on torch makes its gloo groups of `InterruptibleGloo`.
    """
    distributed_c10d.ProcessGroupGloo = InterruptibleGloo  # type: ignore[assignment,misc]  # on purpose


def call_off() -> None:
    """
    Whoever waits in a group that was made by now, and does not have its result within 20 ms, is to
    raise `CalledOff`; so is who waits in one of them later. From any thread.
    """
    with _all_lock:
        found = list(_all)
    for waits in found:
        waits.call_off()


class InterruptibleGloo(dist.ProcessGroup):
    """
    Takes the arguments of torch's `ProcessGroupGloo`, and does as it does.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, **more: object
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one meant for subclasses
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
                    raise RuntimeError("Operation timed out!")  # torch's own words
            return self._outcome()
        except Exception as error:
            _tell(error)
            raise

    def _ended(self, within: timedelta) -> bool:
        try:
            return self._native.wait(within)
        except RuntimeError:  # of the time limit, or of the operation, which will raise again
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
    One in which gloo keeps the caller, whatever limit it gives, so that another thread waits: a message from
    rank to rank, where a limit would end the whole group; and a sum of which each rank keeps a part, which gloo
    makes of all-reduces of everything, and of what the caller does when these are over.
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
            # in the modes of who waits, for tensors are changed here; each thread has modes of its own
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                self._native.wait()  # which does its part of the work: it may be called once
        except Exception as error:  # noqa: BLE001  # whatever it was, it goes to who waits
            self._error = error
        finally:
            self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()


def _interruptible(name: str, work: type[_Collective]) -> Callable[..., dist.Work]:
    def operation(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> dist.Work:
        try:
            native = getattr(self._plain, name)(*args, **kwargs)
        except RuntimeError as error:  # others are of wrong arguments
            _tell(error)
            raise
        return work(native, self._waits)

    operation.__name__ = name
    return operation


for _name in _COLLECTIVES:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Collective))
for _name in _BLOCKING:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Blocking))
