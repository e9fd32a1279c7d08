"""
Process groups with the backend "hccl", over gloo.

As in HCCL, a group makes its links at first use, so a process can be in a group before the others
are. Stopping a device interrupts every thread that waits in a group on this device.

Each operation runs on a thread of the links, on copies of the tensors. A waiting thread can
therefore leave, and an abandoned operation changes no tensor.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from torch_npu.npu import state

OPERATIONS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
SLICE = timedelta(milliseconds=50)
"""The time of one wait for the other members. Between two such waits, a thread notices a stop of
the device."""
BROKEN = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "timed out",
    "Timed out",
)
"""Texts of gloo's errors about a peer that is gone. HCCL does not notice the loss of a peer, and
waits until its device is stopped."""

_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()


def repair_number() -> str:
    """
    Return the number of the repair that group names contain.

    MindIO replaces torch's function for the names of groups. The call of this function here has no
    side effect. Without MindIO there are no repairs, and the number is "0".
    """
    naming = distributed_c10d._process_group_name
    if naming.__module__ == distributed_c10d.__name__:
        return "0"
    return str(naming([], use_hashed_name=False))


class Links:
    """
    The connections of one group, from their creation to their end.
    """

    def __init__(self, group: "Group") -> None:
        self.device = state.current_device()
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._members = (group.rank(), group.size())
        self._store = PrefixStore(f"links-{repair_number()}", group.store.clone())
        self._timeout = group.timeout
        self._asked: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="hccl-links", daemon=True)
        self.thread.start()

    def ask(self, operation: "_Operation") -> None:
        """
        Queue an operation behind the earlier ones.
        """
        self._asked.put(operation)

    def stop(self) -> None:
        """
        Interrupt the waiting threads. Results that arrive later are dropped.
        """
        with self._lock:
            self.stopped.set()
        self._asked.put(None)

    def finish(self, operation: "_Operation") -> None:
        """
        Hand over an operation's result, unless the links were stopped.
        """
        with self._lock:
            if not self.stopped.is_set():
                operation.hand_over()

    def _serve(self) -> None:
        links = self._open()
        while (operation := self._asked.get()) is not None and links is not None:
            operation.carry_out(links)
            del operation

    def _open(self) -> dist.ProcessGroup | None:
        rank, size = self._members
        self._store.set(f"here-{rank}", "1")
        others = [f"here-{each}" for each in range(size)]
        while not self.stopped.is_set():
            try:
                self._store.wait(others, SLICE)
            except RuntimeError:  # not all members have connected yet
                continue
            links = dist.ProcessGroup(self._store, rank, size)
            gloo = dist.ProcessGroupGloo(self._store, rank, size, timeout=self._timeout)
            links._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            links._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            return links
        return None


class _Operation(dist.Work):
    """
    A requested collective operation and its result.
    """

    def __init__(
        self, links: Links, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        super().__init__()
        self._links, self._name, self._named = links, name, named
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arguments = self._copied(arguments)
        self._over = threading.Event()
        self._error: Exception | None = None

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone()
            self._pairs.append((value, copy))
            return copy
        if isinstance(value, list | tuple):
            return type(value)(self._copied(each) for each in value)
        return value

    def carry_out(self, links: dist.ProcessGroup) -> None:
        """
        Run the operation. This runs on the thread of the links.
        """
        try:
            with torch.no_grad():
                work = getattr(links, self._name)(*self._arguments, **self._named)
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            if any(text in str(error) for text in BROKEN):
                return  # the operation stays open, because HCCL would continue to wait
            self._error = error
        self._links.finish(self)

    def hand_over(self) -> None:
        """
        Copy the results into the caller's tensors.
        """
        if self._error is None:
            # through `.data` autograd counts no change, just as with a real backend
            for tensor, copy in self._pairs:
                tensor.data.copy_(copy)
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while not self._over.wait(SLICE.total_seconds()):
            state.refuse_if_stopped()  # refuse links that are made while the device is stopped
            if self._links.stopped.is_set():
                raise RuntimeError(state.FORCE_STOP)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        self.wait()


class Group(dist.ProcessGroup):
    """
    A process group, as `new_group` and `init_process_group` create it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for subclasses
        self.store: Any = store  # Any: torch declares no type for its method `clone`
        self.timeout = timeout
        self._links: Links | None = None
        _groups.add(self)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:  # Any: a string, of a type that torch keeps to itself
        """
        The name of the group. torch keeps the name in its own backends, but this group has none of
        them.
        """
        return self._name

    def ask(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> dist.Work:
        """
        Start an operation. Raises an error with FORCE STOP if the device is stopped.
        """
        state.refuse_if_stopped()
        if self._links is None:
            self._links = Links(self)
        elif self._links.stopped.is_set():
            raise RuntimeError(
                "the links of this group were stopped, and reinit_process_group was not called"
            )
        operation = _Operation(self._links, name, arguments, named)
        self._links.ask(operation)
        return operation

    def stop(self, device: int) -> None:
        """
        Stop the links if they are on this device. Links on another device continue.
        """
        if self._links is not None and self._links.device == device:
            self._links.stop()

    def forget_links(self) -> None:
        """
        Drop the links. The next operation makes new links.
        """
        if self._links is not None:
            self._links.stop()
            self._links = None

    def shutdown(self) -> None:
        self.forget_links()


def _operation(name: str) -> Callable[..., dist.Work]:
    def operation(self: Group, *arguments: Any, **named: Any) -> dist.Work:
        return self.ask(name, arguments, named)

    operation.__name__ = name
    return operation


for _name in OPERATIONS:
    setattr(Group, _name, _operation(_name))


def _stop(device: int) -> None:
    for group in list(_groups):
        group.stop(device)


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """
    Let a group, or all groups, make new links at the next use.

    With `rebuild_link`, this applies to `group`, by default the default group; a replacement can
    then take part. Without it, this applies to all groups with the members that they have.
    """
    if group is None:
        group = distributed_c10d._world.default_pg
    if not rebuild_link:
        for each in list(distributed_c10d._world.pg_map):
            if isinstance(each, Group):
                each.forget_links()
        return None
    if isinstance(group, Group):
        group.forget_links()
    return group


def _end() -> None:
    """
    Stop all link threads at the exit of the process, before the objects that they use are gone.
    """
    threads = [group._links.thread for group in list(_groups) if group._links is not None]
    for group in list(_groups):
        group.forget_links()
    ends = monotonic() + 1.0
    for thread in threads:
        thread.join(max(0.0, ends - monotonic()))


def install() -> None:
    """
    Register the backend "hccl" with torch.
    """
    dist.Backend.register_backend("hccl", Group, devices=["cpu"])
    state.on_stop(_stop)
    atexit.register(_end)
