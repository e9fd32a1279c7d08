"""
Process groups of gloo whose waits can be cancelled.

When `sockets.py` cuts the connections of a group, gloo raises an exception in nearly every thread
that waits for a message. gloo does not wake two kinds of threads (`Pair::signalException` in
gloo/transport/tcp/pair.cc): a thread that has received a part of a message, and a thread that has
sent a part of a message. Such a thread sleeps until the time limit of the group, half an hour. Both
cases occur if a connection ends during a message, for example because the sender is killed.

So gloo carries out each operation, but this module waits for the operation in short time slices.
The waiting thread can stop after any time slice. `groups.py` later frees the group with its
unfinished operation.

`InterruptibleGloo` replaces the name `ProcessGroupGloo` in `torch.distributed.distributed_c10d`.
`init_process_group` and `new_group` of torch 2.13 look up this name when they make a group. So the
user's own groups are interruptible too, and the backend is still called "gloo".
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # the class torch.distributed.Store
from torch.distributed import distributed_c10d
from torch.futures import Future

from tft.spi import TrainingFault

_SLICE = timedelta(milliseconds=20)
"""The length of one time slice of a wait. The time slices delay no wait: a wait returns as soon as
its operation is complete."""

_NO_LIMIT = timedelta(0)
"""The time limit that torch passes to `wait` if the caller has given no time limit."""

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

MESSAGES = ("send", "recv", "recv_anysource")
"""The operations between two ranks. They are not counted as collectives, because ranks of a group
need not have the same number of them."""

OPERATIONS = (*_COLLECTIVES, *_BLOCKING)
"""The methods of a process group that wait for other ranks."""


class CalledOff(TrainingFault, RuntimeError):
    """
    Raised in a thread that waits for other ranks in a collective, when this process cancels the
    wait.
    """

    def __init__(self) -> None:
        super().__init__(
            "the wait for other ranks of a process group was cancelled", kind="network"
        )


class _Waits:
    """
    All waits for operations of one process group, which can be cancelled together.

    This object must not refer to the group, because gloo's threads call its methods. If a gloo
    thread dropped the last reference to its own group, the thread would wait for its own end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised: set[Future[None]] = set()
        """The futures that have no result yet. Each future gets its result once: when its operation
        is over, or when the waits are cancelled."""
        self.called_off = False
        self.entered = 0
        """The number of collectives that were begun, without messages between two ranks."""
        self.last = ("", 0)
        """The operation that was begun last: its name, and the number of elements of its first
        tensor."""
        self.standing: set[int] = set()
        """The threads that wait for an operation now."""

    def begun(self, name: str, arguments: tuple[Any, ...]) -> None:  # Any: as torch passes them
        """
        Record that an operation begins.
        """
        self.entered += name not in MESSAGES
        first = arguments[0] if arguments else None
        while isinstance(first, list | tuple) and first:
            first = first[0]
        self.last = name, first.numel() if isinstance(first, torch.Tensor) else 0

    def inside(self) -> str:
        """
        Return a text that describes the collective for which this process waits, or an empty text
        if it waits for none. A message between two ranks is no collective.
        """
        name, elements = self.last
        if name in MESSAGES or (not self.standing and not self._promised):
            return ""
        return f"{name} of {elements} elements" if elements else name

    def call_off(self) -> None:
        """
        Cancel all waits of the group, and all waits that begin later.
        """
        with self._lock:
            self.called_off = True
            promised, self._promised = self._promised, set()
        for over in promised:
            over.set_result(None)

    def promise(self, native: Future[Any]) -> Future[Any]:  # Any: the result may have any type
        """
        Return a future that gets the result or the exception of torch's future `native`. The future
        raises `CalledOff` if the waits are cancelled before `native` is done.
        """
        over: Future[None] = Future()

        def outcome(_: Future[None]) -> Any:  # Any: the operation `native` may have any result
            if not native.done():
                raise _told(CalledOff())
            try:
                return native.value()  # if `native` has failed, this call raises its error
            except RuntimeError as error:
                raise _told(error)  # noqa: B904  # the error itself, not an error in its handling

        # The function `outcome` runs as a callback of the future, because an error must be raised
        # in a callback. If Python sets an exception as the result of the future, C++ code sees an
        # ordinary result.
        promised = over.then(outcome)
        with self._lock:
            self._promised.add(over)
            called_off = self.called_off
        native.add_done_callback(lambda _: self._settle(over))
        if called_off:
            self.call_off()
        return promised

    def _settle(self, over: Future[None]) -> None:
        if _timer is not None:
            _timer.settled()
        with self._lock:
            if over not in self._promised:
                return
            self._promised.remove(over)
        over.set_result(None)


Failed = Callable[[BaseException, bool], None]
"""A function that is called with the exception of a collective. The bool is True if the calling
thread raises the exception now, and False if it becomes the result of a future."""

_on_failure: Failed | None = None


def watch_failures(failed: Failed | None) -> None:
    """
    Call `failed(error, True)` for every exception that a collective raises when the collective
    starts or while a thread waits for it. Call `failed(error, False)` if the exception is the
    result of a future, for which DDP waits.

    If `failed` is None, stop these calls.
    """
    global _on_failure
    _on_failure = failed


class WaitTimer(Protocol):
    """
    Measures how long a thread waits for other ranks.
    """

    def stood(self, began: float) -> None: ...

    def promised(self) -> None: ...

    def settled(self) -> None: ...


_timer: WaitTimer | None = None


def time_waits(timer: WaitTimer) -> None:
    """
    Call the methods of `timer` from now on: `stood` after each wait, `promised` when a future of a
    collective was asked for, and `settled` when such a collective is complete.
    """
    global _timer
    _timer = timer


def _tell(error: BaseException) -> None:
    if _on_failure is not None:
        _on_failure(error, True)


def _told(error: Exception) -> Exception:
    """
    Pass the exception of a failed collective to the function given to `watch_failures`, and return
    the exception. It becomes the result of the collective's future.
    """
    if _on_failure is not None:
        _on_failure(error, False)
    return error


_all: "weakref.WeakSet[_Waits]" = weakref.WeakSet()
_all_lock = threading.Lock()


def install() -> None:
    """
    Make torch use `InterruptibleGloo` for its gloo groups from now on.
    """
    distributed_c10d.ProcessGroupGloo = InterruptibleGloo  # type: ignore[assignment,misc]  # patches torch


def remove() -> None:
    """
    Make torch use its own gloo groups again.
    """
    distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo  # type: ignore[misc]  # unpatches torch


def call_off() -> None:
    """
    Cancel all waits in the groups that exist now. Each waiting thread raises `CalledOff` within 20
    ms, unless its operation completes before that. Later waits in these groups raise `CalledOff`
    too.

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
        # The group `_plain` passes each operation on to gloo, as an ordinary group of torch does.
        self._plain = dist.ProcessGroup(store, rank, size)
        for group in (self._plain, self):
            group._register_backend(torch.device("cpu"), self.BackendType.GLOO, gloo)
            group._set_default_backend(self.BackendType.GLOO)
        self._waits = _Waits()
        with _all_lock:
            _all.add(self._waits)

    def standing(self) -> tuple[int, str]:
        """
        Return how many collectives this rank has entered, and a text that describes the collective
        for which it waits. The text is empty if it waits for none. Can be called on any thread.
        """
        return self._waits.entered, self._waits.inside()


class _Collective(dist.Work):
    """
    A collective that gloo's own threads carry out. The calling thread can wait for the collective
    in short time slices.
    """

    def __init__(self, native: dist.Work, waits: _Waits) -> None:
        super().__init__()
        self._native = native
        self._waits = waits

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        began = monotonic()
        ends = began + timeout.total_seconds() if timeout else float("inf")
        self._waits.standing.add(threading.get_ident())
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
        finally:
            self._waits.standing.discard(threading.get_ident())
            if _timer is not None:
                _timer.stood(began)

    def _ended(self, within: timedelta) -> bool:
        try:
            return self._native.wait(within)
        # either the time slice is over, or the operation has failed. A failed operation is
        # completed, and `_outcome` raises its error
        except RuntimeError:
            return self._native.is_completed()

    def _outcome(self) -> bool:
        return self._native.wait()

    def get_future(self) -> Future[Any]:
        if _timer is not None:
            _timer.promised()
        return self._waits.promise(self._native.get_future())

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._native.is_completed()

    def is_success(self) -> bool:
        return self._native.is_success()

    def exception(self) -> Any:  # Any: torch's own return type
        return self._native.exception()

    def result(self) -> Any:  # Any: torch's own return type
        return self._native.result()

    def source_rank(self) -> int:
        return self._native.source_rank()

    _source_rank = source_rank


class _Blocking(_Collective):
    """
    An operation for which a separate thread waits, because gloo cannot wait for the operation in
    short time slices.

    There are two kinds of such operations. The first is a message to or from a single rank: if a
    wait for the message exceeds a time limit, gloo ends the whole group. The second is a
    reduce-scatter: gloo carries it out as all-reduces, and the wait itself then copies the result.
    So gloo's wait must be called only once for each of these operations, and without a short time
    limit.
    """

    def __init__(self, native: dist.Work, waits: _Waits) -> None:
        super().__init__(native, waits)
        self._over = threading.Event()
        self._error: Exception | None = None
        self._waiter: threading.Thread | None = None

    def _ended(self, within: timedelta) -> bool:
        if self._waiter is None:
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _counts_changes()
            waiter = threading.Thread(target=self._wait, args=modes, name="tft-waits", daemon=True)
            waiter.start()
            # set `_waiter` only now: if the thread cannot be started, each further wait must try
            # again and raise the same error
            self._waiter = waiter
        return self._over.wait(within.total_seconds())

    def _outcome(self) -> bool:
        if self._error is not None:
            # raise a copy, because `raise` adds a traceback to the error. `self._error` would then
            # refer to this object and to the frames of the caller, and keep them and their process
            # groups alive until a garbage collection
            raise copy(self._error)
        return True

    def _wait(self, grad: bool, inference: bool, counts: bool) -> None:
        # These modes are separate in each thread. gloo's wait changes tensors, so it needs the modes
        # of the thread that started the operation.
        counting = nullcontext() if counts else torch._C._ExcludeDispatchKeyGuard(_COUNTING)
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), counting:
                # call gloo's wait only once, because it does a part of the operation
                self._native.wait()
        except Exception as error:  # noqa: BLE001  # `_outcome` raises it in the waiting thread
            self._error = error.with_traceback(None)
        finally:
            self._over.set()

    def is_completed(self) -> bool:
        # this call starts the thread that waits for the operation and so completes the operation
        return self._ended(timedelta())


_COUNTING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""The dispatch key under which torch increments the version counters of tensors that are changed in
place."""


def _counts_changes() -> bool:
    """
    Return True if torch counts in-place changes in this thread. It does not inside a dispatch mode,
    such as selective activation checkpointing, which refuses tensors that have been changed.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def _interruptible(name: str, work: type[_Collective]) -> Callable[..., dist.Work]:
    def operation(self: InterruptibleGloo, *args: Any, **kwargs: Any) -> dist.Work:
        self._waits.begun(name, args)
        try:
            native = getattr(self._plain, name)(*args, **kwargs)
        except RuntimeError as error:  # errors of other classes mean wrong arguments, not a fault
            _tell(error)
            raise
        return work(native, self._waits)

    operation.__name__ = name
    return operation


for _name in _COLLECTIVES:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Collective))
for _name in _BLOCKING:
    setattr(InterruptibleGloo, _name, _interruptible(_name, _Blocking))
