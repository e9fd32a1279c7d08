"""
The process groups: formed anew under a new name, cut off from another thread, really freed.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # as torch.distributed has them
    BarrierOptions,
    PrefixStore,
    TCPStore,
)
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, TftError
from tft_pytorch import interruptible
from tft_pytorch.sockets import census, cut

log = structlog.get_logger()

GROUP_TIMEOUT = timedelta(minutes=30)
"""torch's own default. A collective that hangs is ended by `quiesce`, when the controller has
found out; a shorter limit could only end one that is merely slow."""

STORE_TIMEOUT = timedelta(seconds=60)
"""Until the store must have answered. It is a process on the same machine or the next, and it is
started again within a second when it dies."""

_ATTEMPT = timedelta(seconds=0.5)
"""Of one attempt to reach the store: a call that has no connection yet has nothing to be cut, so
it is kept short and `quiesce` is asked for in between."""

_FREEING = 0.05
"""Seconds for the groups to be freed, which takes ten milliseconds; a little more for each after the first."""

_FREEING_MORE = 0.005

_FEW = 32
"""Ranks that meet in a sum. Measured: of 2 to 16 on two cores a sum takes 0.4 to 1 of a barrier's time."""

_CUT_AGAIN = 0.02
"""Seconds between two cuts while a group is being formed: connections are made all the while."""


class Groups:
    """
    The default group of this process, and all that the user makes beside it.

    `form` and `clear` are called on the training thread, `quiesce` on any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spared: frozenset[int] | None = None
        self._store_port = 0
        self._left: threading.Event | None = None
        self._abandoned = False
        self._excepthook = sys.excepthook
        self._token = torch.zeros(1, device="cpu")  # whatever the default device is

    def meet(self, *, cuda: bool) -> None:
        """
        Returns when all ranks have called it, and what their devices were to do before that is done. A
        sum goes round in a ring, which among a few ranks takes less than the many messages of a
        barrier, and among many ranks far more than its few rounds.
        """
        if cuda:
            torch.cuda.current_stream().synchronize()  # the all-reduces are over, not only started
        if dist.get_world_size() <= _FEW:
            dist.all_reduce(self._token)
        else:
            options = BarrierOptions()
            options.device = self._token.device
            distributed_c10d._get_default_group().barrier(options).wait()

    def form(
        self,
        name: str,
        host: str,
        port: int,
        rank: int,
        world: int,
        *,
        cuda: bool,
        more: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Join the group of this name at the store; returns when all ranks have. `OrderRefused`
        when `quiesce` came first. `more` makes the groups within it that are always there.
        """
        self.clear()
        left = threading.Event()
        with self._lock:
            self._spared, self._store_port = census(), port
            self._left, self._abandoned = left, False
        self._excepthook = sys.excepthook
        try:
            self._join(name, host, port, rank, world, cuda=cuda)
            more()
            self._refuse_if_abandoned(name)
        except Exception as error:
            with self._lock:
                abandoned = self._abandoned
            if abandoned and not isinstance(error, TftError):
                raise OrderRefused(f"the forming of group {name!r} was called off") from error
            raise
        finally:
            with self._lock:
                self._left = None
            left.set()

    def _join(self, name: str, host: str, port: int, rank: int, world: int, *, cuda: bool) -> None:
        store = self._connect(name, host, port)
        if not cuda:  # which takes groups of two backends, and those are torch's own
            interruptible.install()
        # A group that failed to form leaves its number behind, and that number is part of the
        # keys by which ranks find each other: one that counts from elsewhere is never found.
        distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=GROUP_TIMEOUT,
        )
        self._refuse_if_abandoned(name)

    def _connect(self, name: str, host: str, port: int) -> TCPStore:
        attempts = int(STORE_TIMEOUT / _ATTEMPT)
        for attempt in range(1, attempts + 1):
            self._refuse_if_abandoned(name)
            try:
                store = TCPStore(host, port, is_master=False, timeout=_ATTEMPT)
            except dist.DistError:
                if attempt == attempts:
                    raise
            else:
                store.set_timeout(STORE_TIMEOUT)
                return store
        raise AssertionError("the last attempt has returned or raised")

    def _refuse_if_abandoned(self, name: str) -> None:
        with self._lock:
            if self._abandoned:
                raise OrderRefused(f"the forming of group {name!r} was called off")

    def quiesce(self) -> None:
        """
        Whoever waits in a collective of this process, or for the forming of a group, is to raise.
        """
        with self._lock:
            spared, port, left = self._spared, self._store_port, self._left
            begun, self._abandoned = self._abandoned, left is not None
        if spared is None:
            return
        cut(spared, port)
        interruptible.call_off()
        if left is not None and not begun:
            threading.Thread(
                target=_keep_cutting, args=(left, spared, port), name="tft-quiesce", daemon=True
            ).start()
        if left is None:
            _abort_device_groups()

    def clear(self) -> None:
        """
        Drop all groups. Their connections are cut first: a pending operation would otherwise hold
        up the destructor until its time limit, and a connection that a child process inherited
        would outlive the group, so that the peers would not see it end.
        """
        with self._lock:
            spared, port = self._spared, self._store_port
            self._spared = None
        if spared is None:
            return
        cut(spared, port)
        if dist.is_initialized():
            _drop_unfinished_backward()
            groups = list(distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            _free(groups)
        sys.excepthook = self._excepthook  # torch wraps it once more for each default group


def _drop_unfinished_backward() -> None:
    """
    A backward that ends with an exception leaves what it had yet to do in the queue of its thread, and with
    it all that the functions there refer to: a user's own may have kept their group. It is dropped when the
    next backward begins, and the group would be freed there and then, on the training thread, whatever its
    destructor waits for. Now torch has it, too.
    """
    with torch.enable_grad():
        # on the CPU, whatever the default device is
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch has no types here


def _free(groups: list[dist.ProcessGroup]) -> None:
    """
    Let go of groups that torch has forgotten, each on a thread of its own: most of the time they wait.

    A gloo group's destructor joins the threads that carry out its collectives. Now and then one
    of these is not woken as its connection breaks (`interruptible.py` says when), and it waits for
    `GROUP_TIMEOUT`. Such a group keeps two sleeping threads and its buffers until then; a training
    thread that waited for it would keep the whole job.
    """
    until = monotonic() + _FREEING + _FREEING_MORE * len(groups)
    freeing = []
    while groups:
        last = [groups.pop()]
        freeing.append(threading.Thread(target=last.clear, name="tft-free-group", daemon=True))
        del last
        freeing[-1].start()
    for thread in freeing:
        thread.join(max(0.0, until - monotonic()))
    left = sum(thread.is_alive() for thread in freeing)
    if left:
        log.warning(
            "group_left_behind",
            groups=left,
            why="a collective of it does not end",
            until=GROUP_TIMEOUT,
        )


def _keep_cutting(left: threading.Event, spared: frozenset[int], port: int) -> None:
    while not left.wait(_CUT_AGAIN):
        cut(spared, port)


def _abort_device_groups() -> None:
    """
    NCCL's collectives run on the device and hang there; its own abort ends them. It may take a
    while, so it has its own thread.
    """
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    if not (on_device and dist.is_initialized()):
        return

    def abort(call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the group may have gone meanwhile
            call()

    group = dist.group.WORLD
    if group is not None:
        threading.Thread(target=abort, args=(group.abort,), name="tft-abort", daemon=True).start()
