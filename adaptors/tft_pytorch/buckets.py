"""
DDP's buckets: which gradients are summed together, and how that is kept across a rebuild.

A fresh DDP reduces gradients in a layout of its own making; after its first backward it sorts the parameters
into other buckets, by the order in which their gradients came, and keeps those for ever. gloo's
results depend on where in a bucket a number lies, so a wrapper built anew must be brought to the
layout the lost one had, or the first gradients after an incident differ in their last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # as torch.distributed has it
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from tft.errors import InternalError, MalformedMessage, UsageError

_USUAL_SAMPLE_RATE = 100
"""Of DDP's own statistics: `kDDPRuntimeLoggingSampleRate` in torch's reducer.hpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """
    How one DDP reduces gradients, or will from its next forward on.
    """

    order: tuple[int, ...]
    """Indices of the trained parameters in the order in which they fill the buckets."""
    buckets: tuple[tuple[int, ...], ...] | None
    """As DDP has them; None while it has seen a first backward and not yet sorted."""


class Wrappers:
    """
    The DDP instances in what `wrap` returned, and the layouts that belong to the state held.
    """

    def __init__(self, contributing: Callable[[], None] | None) -> None:
        self._contributing = contributing
        self._watches: list[RemovableHandle] = []
        self._wrappers: list[Any] = []  # DDP; Any: its private methods have no types
        self._layouts: list[Layout | None] | None = None

    def settle(self, built: object) -> None:
        """
        Take the wrappers that were just built, and bring each to its layout if it has one.

        All ranks call it at once: DDP compares the layouts of all ranks itself, in two small
        broadcasts. Raises `UsageError` for a wrapper whose gradient reduction tft cannot repeat.
        """
        wrappers = _find(built)
        for ddp in wrappers:
            _refuse_unsupported(ddp)
        if self._layouts is None:
            self._layouts = [None] * len(wrappers)
        if len(self._layouts) != len(wrappers):
            raise UsageError(
                f"wrap has built {len(wrappers)} DDP wrappers, and {len(self._layouts)} before"
            )
        self._wrappers = wrappers
        for index, (ddp, layout) in enumerate(zip(wrappers, self._layouts, strict=True)):
            if layout is not None:
                self._layouts[index] = _bring(ddp, layout)
            if self._contributing is not None:
                self._watches.append(_watch(ddp, self._contributing))

    def note(self) -> None:
        """
        A step is complete: what layout will the next one be summed in? Costs 10 us a wrapper
        until that is decided, which it is after the second step; then nothing.
        """
        for index, ddp in enumerate(self._wrappers):
            if self._layouts is not None and not _decided(self._layouts[index]):
                self._layouts[index] = _layout_of(ddp) or self._layouts[index]

    def drop(self) -> None:
        """
        Let the wrappers go. Their hooks on the parameters go at once: whoever still holds a
        wrapper must not have it act on the next backward.
        """
        for watch in self._watches:
            watch.remove()
        for ddp in self._wrappers:
            ddp._remove_autograd_hooks()
        self._watches, self._wrappers = [], []

    # ------------------------------------------------------------ to and from another process

    def layouts(self) -> list[list[list[int] | list[list[int]] | None] | None] | None:
        """
        The layouts as plain values.
        """
        return None if self._layouts is None else [_plain(layout) for layout in self._layouts]

    def restore(self, layouts: Any) -> None:  # Any: came from outside, checked here
        """
        The state held from now on was computed with these layouts.
        """
        try:
            self._layouts = None if layouts is None else [_unplain(layout) for layout in layouts]
        except (TypeError, ValueError) as error:
            raise MalformedMessage(f"bucket layouts that cannot be read: {error}") from None


def _decided(layout: Layout | None) -> bool:
    return layout is not None and layout.buckets is not None


def _plain(layout: Layout | None) -> list[list[int] | list[list[int]] | None] | None:
    if layout is None:
        return None
    buckets = layout.buckets
    return [list(layout.order), None if buckets is None else [list(b) for b in buckets]]


def _unplain(plain: Any) -> Layout | None:  # Any: came from outside
    if plain is None:
        return None
    order, buckets = plain
    return Layout(
        order=tuple(map(int, order)),
        buckets=None if buckets is None else tuple(tuple(map(int, b)) for b in buckets),
    )


# ---------------------------------------------------------------- one DDP


def _find(built: object) -> list[Any]:  # DDP, as above
    if isinstance(built, nn.Module):
        return [module for module in built.modules() if isinstance(module, DDP)]
    if isinstance(built, Sequence) and not isinstance(built, str):
        return [ddp for part in built for ddp in _find(part)]
    return []


def _refuse_unsupported(ddp: DDP) -> None:
    reason = None
    if ddp.static_graph:
        reason = "static_graph=True: it counts hooks in its first backward, which cannot be redone"
    elif ddp.mixed_precision is not None:
        reason = "mixed_precision: its hooks stay in the module; use torch.autocast"
    elif ddp._use_python_reducer:
        reason = "compiled autograd: its Python reducer does not say how it sums"
    if reason is not None:
        raise UsageError(f"tft cannot rebuild a DDP with {reason}")


def _watch(ddp: Any, contributing: Callable[[], None]) -> RemovableHandle:
    """
    Have it said in every step, before the last bucket is summed, that this rank contributes.

    The gradient of any parameter comes before that. But with unused parameters there is none that
    is sure to have one, and with devices gradients come on another thread: there it is said when
    the forward is over, and random numbers drawn between that and the all-reduces come too late.
    """

    def say(*_: object) -> None:
        contributing()

    first = _trained(ddp)[0][0]
    if ddp.find_unused_parameters or first.device.type != "cpu":
        return ddp.register_forward_hook(say)  # type: ignore[no-any-return]  # ddp is Any
    return first.register_hook(say)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types here


def _layout_of(ddp: Any) -> Layout | None:
    """
    From DDP's own statistics, refreshed: the only place where it names its buckets.
    """
    if ddp.find_unused_parameters:
        return None  # never sorts anew: its first layout is its only one
    # Nothing is told before a first forward with gradient reduction, and a stage of a pipeline never has one: there
    # all-reduces are started in the last backward alone. This counts a forward, and does no more.
    ddp.reducer.prepare_for_forward()
    ddp.reducer._set_ddp_runtime_logging_sample_rate(1)  # else not after the tenth forward
    ddp.logger.set_runtime_stats_and_log()
    ddp.reducer._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
    told = ddp._get_ddp_logging_data()
    if told.get("has_rebuilt_buckets"):
        buckets = tuple(
            tuple(map(int, bucket.split()))
            for bucket in told["rebuilt_per_bucket_param_indices"].split(",")
        )
        return Layout(order=tuple(i for bucket in buckets for i in bucket), buckets=buckets)
    arrived = told.get("prev_iteration_grad_ready_order_indices", "")
    order = tuple(int(index) for index in arrived.split(",") if index)
    if sorted(order) != list(range(len(_trained(ddp)[0]))):
        return None  # no backward has been summed yet
    return Layout(order=order, buckets=None)


def _bring(ddp: Any, layout: Layout) -> Layout:
    """
    Have a fresh DDP believe that its first backward is over and brought the gradients in the
    layout's order; then it sorts as it does at its second forward.
    """
    parameters, sparse = _trained(ddp)
    if sorted(layout.order) != list(range(len(parameters))):
        raise UsageError(
            f"wrap has built a DDP of {len(parameters)} trained parameters, and one of "
            f"{len(layout.order)} before"
        )
    for parameter, expects_sparse in zip(parameters, sparse, strict=True):
        if expects_sparse:  # a sparse bucket takes no missing gradient for zero
            parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo)
    reducer, world = ddp.reducer, ddp.process_group
    reducer._update_process_group(_group_of_one(parameters[0].device))
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    _pretend_backward(reducer, layout.order)
    reducer._update_process_group(world)
    reducer._rebuild_buckets()
    ddp._has_rebuilt_buckets = True
    for parameter in parameters:
        parameter.grad = None
    settled = _layout_of(ddp)
    if settled is None or settled.buckets is None:
        raise InternalError("DDP has not sorted its buckets after what it took for a backward")
    if layout.buckets is not None and set(layout.buckets) != set(settled.buckets):
        raise UsageError(
            f"wrap has built a DDP that sums in {len(settled.buckets)} other buckets than the "
            f"{len(layout.buckets)} before; it must build the same one each time"
        )
    return settled


def _trained(ddp: Any) -> tuple[list[Tensor], list[bool]]:
    """
    The parameters DDP's indices count, and which of them get sparse gradients.
    """
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse


def _pretend_backward(reducer: Any, order: Sequence[int]) -> None:  # Any: its hook has no type
    """
    Tell the reducer that these gradients have come, one by one. While autograd runs, because the
    all-reduces are finished in a callback that only a backward has; but not by a backward through the
    parameters, which would set off the user's hooks on them and write gradients.
    """

    def arrive(_: Tensor) -> None:
        for index in order:
            reducer._autograd_hook(index)

    with torch.enable_grad():
        trigger = torch.zeros((), requires_grad=True)
        trigger.register_hook(arrive)  # type: ignore[no-untyped-call]  # torch has no types here
        torch.autograd.backward([trigger])


def _group_of_one(device: torch.device) -> dist.ProcessGroup:
    """
    A group in which a sum is a copy and nobody else takes part.
    """
    group = dist.ProcessGroup(HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
