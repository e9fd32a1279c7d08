"""
The process groups of this process. This module forms them under a new name, interrupts their
collectives from another thread, and frees them completely.
"""

import sys
import threading
from collections.abc import Callable, Mapping
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
from tft_pytorch import device, interruptible, watched
from tft_pytorch.device import ABORT_LIMIT, Devices
from tft_pytorch.interruptible import CalledOff, InterruptibleGloo
from tft_pytorch.sockets import census, cut

log = structlog.get_logger()

GROUP_TIMEOUT = timedelta(minutes=30)
"""The time limit of collectives, which is torch's own default. `quiesce` ends a collective that
hangs, when the controller has detected the fault. A shorter limit could only end a collective that
is merely slow."""

STORE_TIMEOUT = timedelta(seconds=60)
"""The time within which the store must answer. The store is a process on the same machine or on
another one. If it dies, it is started again within a second."""

_ATTEMPT = timedelta(seconds=0.5)
"""The time limit of one attempt to reach the store. A call that has no connection yet cannot be
cut. So an attempt is short, and between two attempts it is checked whether `quiesce` was called."""

_FREEING = 0.05
"""Seconds to wait until the groups are freed, which takes 10 ms. `_FREEING_MORE` is added for each
group."""

_FREEING_MORE = 0.005

_FEW = 32
"""The most ranks that use an all-reduce as their barrier. Measured with 2 to 16 ranks on two cores:
an all-reduce takes 0.4 to 1 of the time of a barrier."""

_CUT_AGAIN = 0.02
"""Seconds between two cuts while a group is being formed, since new connections are made all the
time."""


class Groups:
    """
    The default group of this process, and all groups that the user makes in addition to it.

    `form` and `clear` are called on the training thread, `quiesce` on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spared: frozenset[int] | None = None
        self._store_port = 0
        self._left: threading.Event | None = None
        self._abandoned = False
        self._excepthook = sys.excepthook
        self._token = torch.zeros(1, device="cpu")  # whatever the default device is
        self._devices = Devices()
        self._meeting: dist.ProcessGroup | None = None
        """The group of the barrier beside groups of an asynchronous device; else the default group
        is used."""
        self._stopped = False
        """`quiesce` was called since the groups were formed. Set before anything is aborted: an
        aborted collective of a device ends like a complete one."""
        self._begun: tuple[Mapping[dist.ProcessGroup, int] | None, int] | None = None
        """How many collectives each group and how many messages this process had begun at the last
        call of `synchronize` that found all of them complete."""
        self._told = False
        """It was said that this kind of device was not seen."""
        self._aborting: threading.Thread | None = None
        self._abort_began = 0.0

    def meet(self, refuses: bool | None = None) -> bool:
        """
        Wait until all ranks have called this method: the pre-update barrier. Return whether some
        rank passes `refuses` True. None: no rank can refuse anything.

        Few ranks use an all-reduce, whose ring is faster than the many messages of a barrier. Many
        ranks use a barrier, whose few rounds are faster than a long ring, unless they can refuse.
        """
        group = self._meeting or distributed_c10d._get_default_group()
        if refuses is not None:
            refusals = torch.full((1,), float(refuses), device="cpu")
            group.allreduce([refusals]).wait()
            return refusals.item() > 0
        if group.size() <= _FEW:
            group.allreduce([self._token]).wait()
        else:
            options = BarrierOptions()
            options.device = self._token.device
            group.barrier(options).wait()
        return False

    def synchronize(self, *, closing: bool) -> None:
        """
        Wait until the devices have done all their work, before an update window opens, or with
        `closing` before it closes and before the step ends.

        Raises `CalledOff` if a collective among this work may have been aborted, because its result
        is then wrong. With `closing`, this concerns only collectives that were begun since the last
        call.
        """
        self._devices.synchronize()
        begun = device.sequence(self._devices), watched.messages()
        if closing and begun[0] is not None and begun == self._begun:
            return  # there was no collective
        if self._stopped:
            raise CalledOff
        error = device.reported_error(self._devices)
        if error:
            raise dist.DistBackendError(error)
        self._begun = begun

    def form(
        self,
        name: str,
        host: str,
        port: int,
        rank: int,
        world: int,
        *,
        devices: Devices,
        more: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Join the process group `name` at the store. Return when all ranks have joined.

        `more` is then called, to make further groups that always exist within this group. Raises
        `OrderRefused` if `quiesce` is called before the group is formed.
        """
        self.clear()
        left = threading.Event()
        with self._lock:
            self._spared, self._store_port = census(), port
            self._left, self._abandoned = left, False
            self._devices, self._stopped, self._aborting = devices, False, None
        self._excepthook = sys.excepthook
        try:
            self._join(name, host, port, rank, world)
            more()
            self._refuse_if_abandoned(name)
        except Exception as error:
            with self._lock:
                abandoned = self._abandoned
            if abandoned and not isinstance(error, TftError):
                raise OrderRefused(f"forming the group {name!r} was cancelled") from error
            raise
        finally:
            with self._lock:
                self._left = None
            left.set()

    def _join(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        devices = self._devices
        store = self._connect(name, host, port)
        if devices.kind == "cpu":
            interruptible.install()
        else:  # a group with two backends must be torch's own
            interruptible.remove()
        device.prepare_environment(devices)
        if devices.asynchronous:
            watched.count_messages()
        if rank == 0 and not self._told:
            self._told = True
            device.tell_unseen(devices)
        # Each attempt to form a group increments this counter, a failed attempt too. The counter is
        # part of the keys by which ranks find each other, so it must be equal on all ranks: reset it.
        distributed_c10d._world.group_count = 0
        dist.init_process_group(
            devices.backends,
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=GROUP_TIMEOUT,
        )
        if devices.asynchronous:
            barrier = PrefixStore(f"{name}/barrier", store)
            self._meeting = InterruptibleGloo(barrier, rank, world, GROUP_TIMEOUT)
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
                raise OrderRefused(f"forming the group {name!r} was cancelled")

    def quiesce(self) -> None:
        """
        Make every thread raise an exception that waits in a collective of this process, or that
        waits while a group is being formed.
        """
        with self._lock:
            spared, port, left = self._spared, self._store_port, self._left
            begun, self._abandoned = self._abandoned, left is not None
            self._stopped = True
        if spared is None:
            return
        interruptible.call_off()
        if self._devices.asynchronous:
            self._abort(spared, port)
        if left is not None or not self._devices.asynchronous:
            cut(spared, port)
        if left is not None and not begun:
            threading.Thread(
                target=_keep_cutting, args=(left, spared, port), name="tft-quiesce", daemon=True
            ).start()

    def _abort(self, spared: frozenset[int], port: int) -> None:
        """
        Abort the groups of the devices on another thread, because an abort takes a while, and cut
        gloo's connections afterwards.

        Connections that are cut before the abort would include those of the devices' groups. Other
        ranks would then see errors in collectives that they could still complete.
        """
        with self._lock:
            if self._spared is not spared:  # other groups have been formed since
                return
            began = self._aborting is None or not self._aborting.is_alive()
            if began:
                self._aborting = threading.Thread(
                    target=self._abort_then_cut,
                    args=(device.groups(), spared, port),
                    name="tft-abort",
                    daemon=True,
                )
                self._abort_began = monotonic()
                self._aborting.start()
        if not began and monotonic() - self._abort_began > ABORT_LIMIT:
            cut(spared, port)

    def _abort_then_cut(
        self, groups: list[dist.ProcessGroup], spared: frozenset[int], port: int
    ) -> None:
        try:
            device.abort(groups, self._devices)
        finally:
            with self._lock:  # the connections of groups that were formed meanwhile must stay
                if self._spared is spared:
                    cut(spared, port)

    def clear(self) -> None:
        """
        Drop all groups. Groups of an asynchronous device are aborted first. Connections of gloo are
        cut, for two reasons.

        A pending operation would otherwise delay the destructor of its group until its time limit.
        And a connection that a child process inherited would outlive the group, so the peers would
        not see it end.

        Raises `OrderRefused` if the groups of a device cannot be aborted.
        """
        with self._lock:
            spared, port = self._spared, self._store_port
            self._spared = None
        if spared is None:
            return
        if not self._devices.asynchronous:
            cut(spared, port)
        if dist.is_initialized():
            _drop_unfinished_backward()
            groups = list(distributed_c10d._world.pg_map)
            if self._devices.asynchronous:
                device.discard(self._devices)
                cut(spared, port)
            else:
                dist.destroy_process_group()
            if self._meeting is not None:
                groups.append(self._meeting)
                self._meeting = None
            self._begun = None
            _free(groups)
        sys.excepthook = self._excepthook  # torch wraps the hook again for each default group


def _drop_unfinished_backward() -> None:
    """
    Run a small backward, so that torch drops the remaining work of an interrupted backward.

    A backward that ends with an exception leaves its remaining work in the queue of its thread. The
    work refers to many objects, for example to a function of the user that refers to a process
    group. torch drops the queue when the next backward begins. If this happened later, it could
    free a group on the training thread, which would wait for the group's destructor. Now torch
    itself still refers to the group, so dropping the queue does not free the group.
    """
    with torch.enable_grad():
        # on the CPU, whatever the default device is
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch has no types here


def _free(groups: list[dist.ProcessGroup]) -> None:
    """
    Free groups to which torch no longer refers. Each is freed on its own thread, because the
    destructors of groups wait most of the time.

    The destructor of a gloo group joins the threads that carry out its collectives. Sometimes such
    a thread is not woken when its connection breaks (`interruptible.py` explains this). It then
    waits for `GROUP_TIMEOUT`. Until then the group keeps two sleeping threads and its buffers. If
    the training thread waited for the group, the whole job would wait.
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
