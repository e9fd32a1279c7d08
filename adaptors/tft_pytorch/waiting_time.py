"""
Measures how long the training thread waits for other ranks, and notices when a forward pass begins.

A collective makes all ranks wait for the slowest rank, so a step takes the same time on all ranks.
The time of the step without the rank's waits is the time for the rank's own work. This time shows
which rank is slow.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic
from weakref import ReferenceType, ref

import torch
from torch import nn

from tft_pytorch import interruptible

_HOOK = -1
"""The key of this module's hook in a module's dict of hooks. torch numbers all other hooks from 0.
The hook is put into the dict directly, because it is added and removed in every step, and
`register_forward_pre_hook` would take too long for that."""


class WaitingTime:
    """
    Adds up the waits of the training thread in the gloo groups of this process. Measures nothing
    until the first call of `begin`.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        """The number of the training thread. None: nothing is measured."""
        self._computing: Callable[[], None] | None = None
        self._total = 0.0
        self._promised = 0.0
        """The time at which DDP began its last collective. DDP waits for the future of this
        collective at the end of the backward pass. 0.0 if that wait is in `_total` already."""
        self._backward = -1
        """The number of the backward pass in which `_promised` was noted."""
        self._settled = 0.0
        """The time at which the last collective with a future was complete."""
        self._modules: list[ReferenceType[nn.Module]] = []
        """The modules whose forward passes are noticed, as weak references, because a DDP refers to
        its process group. If the last reference to a group were here, the training thread would
        free the group, and might wait half an hour for the group's threads. `groups.py` frees
        groups on other threads."""
        self._hooked = False

    def begin(self, computing: Callable[[], None]) -> None:
        """
        Begin to measure the waits of the calling thread, and to call `computing` when the first
        forward pass of a step begins.
        """
        self._thread, self._computing = threading.get_ident(), computing
        interruptible.time_waits(self)

    def watch(self, built: object) -> None:
        """
        Notice the forward passes of `built`, or of the modules in `built` if it is a collection of
        modules. Forget the modules of the call before.
        """
        self._unhook()
        self._modules = [] if self._computing is None else [ref(each) for each in _modules(built)]

    def step_begins(self) -> None:
        """
        Call `computing` when the next forward pass begins.

        The hook of the modules is removed at that moment, because `torch.jit.script` refuses
        modules with hooks, and a script may call it after the update window of a step.
        """
        for module in self._living():
            module._forward_pre_hooks[_HOOK] = self._forward
        self._hooked = True

    def waited(self) -> float:
        """
        Return the seconds that the training thread has waited for other ranks so far.
        """
        self._count_promised()
        return self._total

    def __deepcopy__(self, memo: dict[int, object]) -> "WaitingTime":
        # the user may copy a module that has this object as a hook: do not watch the copy
        return WaitingTime()

    def __reduce__(self) -> tuple[type["WaitingTime"], tuple[()]]:
        return WaitingTime, ()  # for a module that is pickled: the loaded module is not watched

    # ------------------------------------------------------------ called by `interruptible`

    def stood(self, began: float) -> None:
        """
        Record that a wait for a collective, which began at the time `began`, has ended. Waits of
        other threads do not count.
        """
        if threading.get_ident() == self._thread:
            self._total += monotonic() - began

    def promised(self) -> None:
        """
        Record that a collective has begun, and that the caller waits later for its future. Only DDP
        waits in this way: it begins its collectives during the backward pass, the last one when all
        gradients are computed. Then it waits for all of them in C++ code.
        """
        if threading.get_ident() == self._thread:
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._count_promised()  # count the wait at the end of the backward pass before
                self._backward = backward
            self._promised = monotonic()

    def settled(self) -> None:
        """
        Record that a collective with a future is complete. Called on any thread.
        """
        self._settled = monotonic()

    # ------------------------------------------------------------ inside

    def _forward(self, *_: object) -> None:
        if self._computing is not None and threading.get_ident() == self._thread:
            self._unhook()
            self._count_promised()
            self._computing()

    def _unhook(self) -> None:
        if self._hooked:
            self._hooked = False
            for module in self._living():
                module._forward_pre_hooks.pop(_HOOK, None)

    def _living(self) -> Iterator[nn.Module]:
        for each in self._modules:
            module = each()
            if module is not None:
                yield module

    def _count_promised(self) -> None:
        """
        Add the wait of DDP at the end of the last backward pass to `_total`. The wait lasts from
        the beginning of the pass's last collective until all collectives of the pass are complete.
        """
        if self._promised:
            self._total += max(0.0, self._settled - self._promised)
            self._promised = 0.0


def _modules(built: object) -> Iterable[nn.Module]:
    if isinstance(built, nn.Module):
        return [built]
    parts: Iterable[object] = ()
    if isinstance(built, Mapping):
        parts = built.values()
    elif isinstance(built, list | tuple):
        parts = built
    return [part for part in parts if isinstance(part, nn.Module)]


waiting_time = WaitingTime()
"""The waits of this process."""
