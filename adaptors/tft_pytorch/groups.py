"""
Manages the process groups of this process. At the start and after every incident, this module forms
the groups under a new name. It interrupts the collectives of the groups from another thread, and
frees the groups completely.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from time import monotonic
from weakref import ref

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # the classes of torch.distributed
    BarrierOptions,
    PrefixStore,
    TCPStore,
)
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, TftError
from tft.spi import GroupStanding
from tft_pytorch import device, interruptible, watched
from tft_pytorch.device import ABORT_LIMIT, Devices
from tft_pytorch.group_standings import standings
from tft_pytorch.idle_loops import calm
from tft_pytorch.interruptible import CalledOff, InterruptibleGloo
from tft_pytorch.sockets import census, cut, stand_in

log = structlog.get_logger()

GROUP_TIMEOUT = timedelta(minutes=30)
"""The time limit of collectives, which is torch's own default. This limit need not be short: when
the controller has detected a fault, `Groups.quiesce` ends the collectives that hang. A shorter
limit could end a collective that is only slow."""

STORE_TIMEOUT = timedelta(seconds=60)
"""The time within which the rendezvous store must answer. The store is a process on this machine or
on another machine. If the store dies, tft starts it again within a second."""

_ATTEMPT = timedelta(seconds=0.5)
"""The time limit of one attempt to reach the rendezvous store. An attempt that has no connection
yet cannot be interrupted. So attempts are short. Between two attempts the code checks whether
`Groups.quiesce` was called, which cancels the attempts."""

_FREEING = 0.05
"""The time in seconds for which `_Freeing.wait` waits until the old groups are freed.
`_FREEING_MORE` seconds are added for each group. To free the groups usually takes 10 ms."""

_FREEING_MORE = 0.005

_FEW = 32
"""The most ranks that use an all-reduce as their barrier. In measurements with 2 to 16 ranks on two
cores, an all-reduce took 0.4 to 1.0 times as long as a barrier."""

_CUT_AGAIN = 0.02
"""The number of seconds between two cuts of the connections of groups. Connections are cut again
and again in two cases, because new connections may be made meanwhile:

- A group that another thread is forming is given up.
- Groups of a device are aborted. The first collectives of a group make connections.

When an abort of groups of a device begins, the first cut comes only after this time, because the
abort has then reached all groups."""

_STAND_IN_AGAIN = 25
"""Once in this many cuts, the process also connects to its own listening sockets in the place of
the other ranks (see `sockets.stand_in`). This is not done at each cut, because it takes 50 us for
each rank of each group."""


class Groups:
    """
    The default group of this process, and all groups that the user makes in addition to it.

    `form` and `clear` are called on the training thread, `quiesce` on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spared: frozenset[int] | None = None
        self._store_port = 0
        self._world = 1
        self._left: threading.Event | None = None
        self._abandoned = False
        self._excepthook = sys.excepthook
        # on the CPU for gloo, because the script may have set another default device
        self._token = torch.zeros(1, device="cpu")
        self._devices = Devices()
        self._meeting: dist.ProcessGroup | None = None
        """The gloo group of the pre-update barrier, if the other groups are on an asynchronous
        device. None otherwise: the barrier then uses the default group."""
        self._stopped = False
        """True if `quiesce` was called since the groups were formed. The flag is set before any
        group is aborted, because on a device an aborted collective looks like a complete
        collective."""
        self._begun: tuple[Mapping[dist.ProcessGroup, int] | None, int] | None = None
        """The number of collectives of each group, and of messages of this process, that had begun
        at the last successful call of `synchronize`. All of these collectives and messages were
        complete then."""
        self._told = False
        """True if `device.tell_unseen` was called. That function must print its warning only
        once."""
        self._aborting: threading.Thread | None = None
        self._looking = threading.Lock()
        """Held while another thread looks at the groups, and while `clear` drops them: the other
        thread must not hold the last reference to a group, because it would then wait for the
        group's destructor."""
        self._freeing: _Freeing | None = None
        """The object whose threads free the groups that the last call of `clear` dropped."""
        self._outlived: list[dist.ProcessGroup] = []
        """Groups of earlier calls of `clear` that something else still referred to. They are freed
        by a later call, when nothing refers to them any more."""

    def meet(self, refuses: bool | None = None) -> bool:
        """
        Wait until all ranks have called this method: the pre-update barrier. Return True if some
        rank refuses the update of the step.

        `refuses` is True if this rank refuses the update. If no rank can refuse, `refuses` is None
        on all ranks, and this method returns False.

        Ranks that can refuse use an all-reduce of `refuses`. Otherwise, up to `_FEW` ranks use an
        all-reduce, whose ring is faster than the many messages of a barrier. More ranks use a
        barrier, whose few rounds are faster than a long ring.
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

    @property
    def aborted(self) -> bool:
        """
        True if collectives may have been aborted on a device since the groups were formed. Such a
        collective looks like a complete one, and its result is wrong.
        """
        return self._stopped and self._devices.asynchronous

    def synchronize(self, *, closing: bool) -> None:
        """
        Wait until the devices have done all their work. Called before an update window opens.
        Called with `closing=True` before an update window closes, and before a step ends.

        Raises `CalledOff` if a collective in this work may have been aborted, because its result is
        then wrong. Raises `DistBackendError` if a communicator reports an error. With
        `closing=True`, both checks are left out if no collective has begun since the last call.
        """
        self._devices.synchronize()
        begun = device.sequence(self._devices), watched.messages()
        if closing and begun[0] is not None and begun == self._begun:
            return  # no collective has begun since the last call, so no error can be new
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
        Join the process group `name` at the rendezvous store at `host` and `port`. Return when all
        ranks have joined.

        Then call `more`, which forms further groups among these ranks. Raises `OrderRefused` if
        `quiesce` is called before the group is formed.
        """
        self.clear()
        # wait before `census`, which would otherwise count the sockets of the old groups as sockets
        # to spare
        if self._freeing is not None:
            self._outlived = self._freeing.wait()
            self._freeing = None
        left = threading.Event()
        with self._lock:
            self._spared, self._store_port, self._world = census(), port, world
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
                raise OrderRefused(
                    f"forming the group {name!r} was cancelled, because an incident is "
                    "being handled"
                ) from error
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
        else:
            # For devices, torch combines gloo and the backend of the device in one group. Both
            # backends must be written in C++, so restore torch's own gloo groups.
            interruptible.remove()
        device.prepare_environment(devices)
        if devices.asynchronous:
            watched.count_messages()
        if rank == 0 and not self._told:
            self._told = True
            device.tell_unseen(devices)
        # Reset torch's counter of groups. torch increments the counter at each attempt to form a
        # group, even if the attempt fails. The counter is part of the keys by which ranks find each
        # other, so it must be equal on all ranks.
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
        raise AssertionError("not reached: the last attempt to connect has returned or raised")

    def _refuse_if_abandoned(self, name: str) -> None:
        with self._lock:
            if self._abandoned:
                raise OrderRefused(
                    f"forming the group {name!r} was cancelled, because an incident is "
                    "being handled"
                )

    def quiesce(self) -> None:
        """
        Make every thread of this process that waits in a collective raise an exception. Threads
        that wait while a group is being formed raise an exception too.
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
            self._cut(spared, port)
        if left is not None and not begun:
            threading.Thread(
                target=self._keep_cutting,
                args=(left, spared, port),
                name="tft-quiesce",
                daemon=True,
            ).start()

    def _cut(self, spared: frozenset[int], port: int, *, stands_in: bool = True) -> None:
        cut(spared, port, listening=self._devices.blocks_in_accept)
        # the gloo groups that accompany the groups of a device connect two ranks only when these
        # first need each other, so a thread may wait for a connection at any time
        if stands_in and (self._left is not None or self._devices.asynchronous):
            stand_in(spared, self._world)

    def _keep_cutting(self, over: threading.Event, spared: frozenset[int], port: int) -> None:
        for number in count():
            if over.wait(_CUT_AGAIN):
                return
            self._cut_present(spared, port, stands_in=number % _STAND_IN_AGAIN == 0)

    def _abort(self, spared: frozenset[int], port: int) -> None:
        """
        Abort the groups of the devices on another thread, because an abort takes time. Cut the
        connections of this process's groups while the abort lasts.

        If the connections were cut before the abort, other ranks would see errors in collectives
        that they could still complete. Once the abort has begun, no collective with this rank can
        be completed. The thread of the backend notices the abort only when one of its connections ends, or
        after half a second. And a communicator that is being made is not aborted at all: the thread
        that makes it waits for other ranks, until its sockets are cut.
        """
        with self._lock:
            # new groups were formed since `quiesce` was called, and must not be aborted
            if self._spared is not spared:
                return
            began = self._aborting is None or not self._aborting.is_alive()
            if began:
                self._aborting = threading.Thread(
                    target=self._abort_and_cut,
                    args=(device.groups(), spared, port),
                    name="tft-abort",
                    daemon=True,
                )
                self._aborting.start()

    def _abort_and_cut(
        self, groups: list[dist.ProcessGroup], spared: frozenset[int], port: int
    ) -> None:
        over = threading.Event()

        def cut_meanwhile() -> None:
            if self._devices.blocks_in_accept or not over.wait(ABORT_LIMIT):
                self._keep_cutting(over, spared, port)

        # if the system has no more threads, only the abort takes longer, so the error is ignored
        with suppress(RuntimeError):
            threading.Thread(target=cut_meanwhile, name="tft-cut", daemon=True).start()
        try:
            device.abort(groups)
        finally:
            over.set()
            self._cut_present(spared, port)

    def _cut_present(self, spared: frozenset[int], port: int, *, stands_in: bool = True) -> None:
        # do not cut the connections of groups that were formed after the abort began
        with self._lock:
            if self._spared is spared:
                self._cut(spared, port, stands_in=stands_in)

    def standings(self, devices: Devices) -> Sequence[GroupStanding]:
        """
        Return, for each process group of this rank, how many collectives the rank has begun, and in
        which collective it waits. Can be called on any thread.
        """
        with self._looking:
            return standings(devices)

    def clear(self) -> None:
        """
        Drop all process groups. Other threads free the groups, and `form` waits for these threads.
        Groups of an asynchronous device are aborted first. The connections of gloo are cut, for two
        reasons.

        First, a pending operation would otherwise delay the destructor of its group until the time
        limit of the operation. Second, a child process may have inherited a connection. Without the
        cut, this connection would stay open after the group is freed, so the other ranks would not
        see that the group has ended.

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
            with self._looking:
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
            groups += self._outlived
            self._outlived = []
            self._freeing = _Freeing(groups, spared)
        # torch has replaced sys.excepthook when it made the default group, so restore the earlier
        # function
        sys.excepthook = self._excepthook


def _drop_unfinished_backward() -> None:
    """
    Run a small backward, so that torch drops the remaining work of an interrupted backward.

    A backward that ends with an exception leaves its remaining work in the queue of its thread. The
    work refers to many objects, for example to a function of the user that refers to a process
    group. torch drops the queue when the next backward begins. If torch dropped the queue later,
    this could free a group on the training thread, which would wait for the group's destructor. Now
    torch itself still refers to the group, so dropping the queue does not free the group.
    """
    with torch.enable_grad():
        # the tensor must be on the CPU, but the script may have set another default device
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch has no types here


class _Freeing:
    """
    Frees groups to which torch no longer refers. Each group is freed on a separate thread, because
    the destructors of groups spend most of their time waiting.

    The destructor of a gloo group joins the threads that carry out its collectives. Sometimes such
    a thread is not woken when its connection breaks (`interruptible.py` explains this). The thread
    then waits for `GROUP_TIMEOUT`. Until then the group keeps three sleeping threads and its
    buffers. If the training thread waited for the group, the whole job would wait.

    A script or a framework may still refer to a group. `wait` returns these groups. The caller must
    keep them, because the thread that drops the last reference to a group waits for its destructor.
    """

    def __init__(self, groups: list[dist.ProcessGroup], spared: frozenset[int]) -> None:
        """
        Begin to free the groups, and empty the list `groups`. `spared` has the inode numbers of the
        sockets that were open before the groups were formed.
        """
        self._spared = spared
        self._until = monotonic() + _FREEING + _FREEING_MORE * len(groups)
        self._threads: list[threading.Thread] = []
        self._groups = [ref(group) for group in groups]
        self._kept: list[dist.ProcessGroup] = []
        """The groups that stay alive, because no thread could be started to free them."""
        while groups:
            last = [groups.pop()]
            thread = threading.Thread(target=last.clear, name="tft-free-group", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self._kept += last
                continue
            finally:
                del last
            self._threads.append(thread)

    def wait(self) -> list[dist.ProcessGroup]:
        """
        Wait until the groups are freed. Give up `_FREEING` seconds after `__init__` was called,
        plus `_FREEING_MORE` seconds for each group. Return the groups that live on, because
        something else refers to them, or because no thread could be started.
        """
        for thread in self._threads:
            thread.join(max(0.0, self._until - monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        if left:
            calm(self._spared)
            log.warning(
                "group_left_behind",
                groups=left,
                why="a collective of the group does not end",
                until=GROUP_TIMEOUT,
            )
        return [group for each in self._groups if (group := each()) is not None]
