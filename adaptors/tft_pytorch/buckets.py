"""
Restores the buckets of DDP when tft builds a new DDP after an incident. A bucket is a group of
gradients that DDP reduces together.

A new DDP puts the parameters into buckets before it knows in which order their gradients come.
After its first backward, the DDP sorts the parameters into other buckets by that order. It never
changes these buckets again. gloo's results depend on the place of a number in its bucket. So a new
wrapper must get the bucket layout of the wrapper that it replaces. Otherwise the first gradients
after an incident differ in their last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # the class torch.distributed.HashStore
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from tft.errors import InternalError, MalformedMessage, UsageError
from tft_pytorch import step_numbers

_USUAL_SAMPLE_RATE = 100
"""DDP usually collects its statistics once in this many steps. torch has the same number in
reducer.hpp, as `kDDPRuntimeLoggingSampleRate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """
    The order and the buckets in which one DDP reduces its gradients.
    """

    order: tuple[int, ...]
    """The indices of the trained parameters, in the order in which these parameters fill the
    buckets."""
    buckets: tuple[tuple[int, ...], ...] | None
    """The buckets, each as a list of parameter indices. None after the first backward of the DDP,
    because the DDP sorts its buckets only at the next forward."""


class Wrappers:
    """
    The DDP instances in the object that the user's function returned, and the bucket layout of each
    DDP. The user's function is `wrap` or the factory `make`.
    """

    def __init__(self, contributing: Callable[[], None] | None, *, early: bool = False) -> None:
        """
        The function `contributing` is called in every step before this rank contributes to the last
        all-reduce. If `early` is True, `contributing` is called at the end of each forward pass,
        too. The hook `tft_watch` has received both arguments.
        """
        self._contributing = contributing
        self._early = early
        self._watches: list[RemovableHandle] = []
        self._wrappers: list[Any] = []  # Any: DDPs; their private methods have no types
        self._layouts: list[BucketLayout | None] | None = None

    def settle(self, built: object) -> None:
        """
        Find the DDPs in `built`, the wrapper or model that the user's function has made. Give each
        DDP the bucket layout of the earlier DDP that it replaces, if there was an earlier DDP.

        All ranks must call this method at the same time, because DDP compares the layouts of all
        ranks in two small broadcasts. Raises `UsageError` for a DDP whose gradient reduction tft
        cannot repeat, or if `built` has another number of DDPs than before.
        """
        wrappers = _find(built)
        for ddp in wrappers:
            _refuse_unsupported(ddp)
        if self._layouts is None:
            self._layouts = [None] * len(wrappers)
        if len(self._layouts) != len(wrappers):
            raise UsageError(
                f"the function wrap of session.adopt has built {len(wrappers)} DDP wrappers, but "
                f"the first time {len(self._layouts)}: it must build the same number each time"
            )
        self._wrappers = wrappers
        for index, (ddp, layout) in enumerate(zip(wrappers, self._layouts, strict=True)):
            if layout is not None:
                self._layouts[index] = _bring(ddp, layout)
            if self._contributing is not None:
                self._watches += _watch(ddp, self._contributing, early=self._early)

    def note(self) -> None:
        """
        Note the bucket layout that each DDP will use in the next step. Called when a step is
        complete.

        A call costs 10 us for each DDP until the layout of the DDP is final, which is after the
        second step. Then a call costs next to nothing.
        """
        for index, ddp in enumerate(self._wrappers):
            if self._layouts is not None and not _decided(self._layouts[index]):
                self._layouts[index] = _layout_of(ddp) or self._layouts[index]

    def drop(self) -> None:
        """
        Drop the references to the DDPs, and remove their hooks on the parameters at once.

        Otherwise a DDP that the user still refers to would start all-reduces in the next backward.
        The DDP also drops its process group now, while torch still refers to the group. Otherwise
        the thread that drops the DDP would wait for the destructor of the group, which may take
        half an hour, and would hold the GIL meanwhile.
        """
        for watch in self._watches:
            watch.remove()
        for ddp in self._wrappers:
            ddp._remove_autograd_hooks()
            for name in ("reducer", "logger", "process_group"):
                vars(ddp).pop(name, None)
            ddp.forward = _refuse_to_compute
        self._watches, self._wrappers = [], []

    # ------------------------------------------------------------ transfer to another process

    def layouts(self) -> list[list[list[int] | list[list[int]] | None] | None] | None:
        """
        Return the bucket layouts of all DDPs as plain lists, in the form that `restore` takes.
        Return None if no DDP was built yet.
        """
        return None if self._layouts is None else [_plain(layout) for layout in self._layouts]

    def restore(self, layouts: Any) -> None:  # Any: unpacked from a message, not yet checked
        """
        Set the bucket layouts that belong to the training state which this rank now has. `layouts`
        is a result of the method `layouts`, often of another rank.

        Raises `MalformedMessage` if `layouts` cannot be read.
        """
        try:
            self._layouts = None if layouts is None else [_unplain(layout) for layout in layouts]
        except (TypeError, ValueError) as error:
            raise MalformedMessage(
                "the description of DDP's gradient buckets that another rank has sent cannot be "
                f"read: {error}"
            ) from None


def _refuse_to_compute(*_: object, **__: object) -> None:
    raise UsageError(
        "a DDP from before an incident was called, whose process groups are gone: call "
        "session.model, which is built anew after each incident"
    )


def _decided(layout: BucketLayout | None) -> bool:
    return layout is not None and layout.buckets is not None


def _plain(layout: BucketLayout | None) -> list[list[int] | list[list[int]] | None] | None:
    if layout is None:
        return None
    buckets = layout.buckets
    return [list(layout.order), None if buckets is None else [list(b) for b in buckets]]


def _unplain(plain: Any) -> BucketLayout | None:  # Any: unpacked from a message
    if plain is None:
        return None
    order, buckets = plain
    return BucketLayout(
        order=tuple(map(int, order)),
        buckets=None if buckets is None else tuple(tuple(map(int, b)) for b in buckets),
    )


# ---------------------------------------------------------------- one DDP


def _find(built: object) -> list[Any]:  # Any: DDPs, whose private methods have no types
    if isinstance(built, nn.Module):
        return [module for module in built.modules() if isinstance(module, DDP)]
    if isinstance(built, Sequence) and not isinstance(built, str):
        return [ddp for part in built for ddp in _find(part)]
    return []


def _refuse_unsupported(ddp: DDP) -> None:
    reason = None
    if ddp.static_graph:
        reason = (
            "static_graph=True, because such a DDP counts hooks in its first backward, which tft "
            "cannot repeat: build the DDP without static_graph"
        )
    elif ddp.mixed_precision is not None:
        reason = (
            "mixed_precision, because the hooks of such a DDP stay in the module: use "
            "torch.autocast instead"
        )
    elif ddp._use_python_reducer:
        reason = (
            "compiled autograd, because the Python reducer of such a DDP does not say how it "
            "reduces gradients: do not set torch._dynamo.config.optimize_ddp to 'python_reducer'"
        )
    if reason is not None:
        raise UsageError(f"tft cannot rebuild a DDP with {reason}")


def _watch(
    ddp: Any, contributing: Callable[[], None], *, early: bool
) -> tuple[RemovableHandle, ...]:
    """
    Arrange that `contributing` is called in every step, before the last bucket of gradients is
    all-reduced. If `early` is True, call `contributing` at the end of the forward, too. Return
    handles, whose `remove` stops these calls.

    Usually a hook on the gradient of one parameter calls `contributing`, because all gradients are
    ready before the last all-reduce. In two cases only a hook at the end of the forward calls
    `contributing`:

    - With `find_unused_parameters`, no parameter is sure to get a gradient.
    - On devices, the gradients are computed on another thread.

    In these two cases, random numbers that are drawn between the forward and the all-reduces are
    drawn after the call. So the rank-local state that `contributing` captures does not include
    these draws.
    """

    def say(*_: object) -> None:
        contributing()

    def arrived(gradient: Tensor) -> None:
        step_numbers.watch.own(gradient)
        contributing()

    first = _trained(ddp)[0][0]
    if ddp.find_unused_parameters or first.device.type != "cpu":
        return (ddp.register_forward_hook(say),)
    before = (ddp.register_forward_hook(say),) if early else ()
    return (*before, first.register_hook(arrived))  # type: ignore[no-untyped-call]  # torch has no types here


def _layout_of(ddp: Any) -> BucketLayout | None:
    """
    Read the present bucket layout of `ddp` from the statistics that DDP collects for its logs. The
    statistics are refreshed first. Return None if the layout is not known yet.

    DDP reports its buckets only in these statistics.
    """
    if ddp.find_unused_parameters:
        # a DDP with find_unused_parameters never sorts its buckets, so a new DDP has the same
        # layout
        return None
    # The statistics of DDP are empty until the DDP has counted a forward with gradient reduction.
    # In a pipeline stage no forward counts, because only the last backward of a step starts
    # all-reduces. This call of `prepare_for_forward` makes the DDP count a forward, and does
    # nothing else.
    ddp.reducer.prepare_for_forward()
    # without the sample rate 1, DDP collects statistics only in its first 10 forwards
    ddp.reducer._set_ddp_runtime_logging_sample_rate(1)
    ddp.logger.set_runtime_stats_and_log()
    ddp.reducer._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
    told = ddp._get_ddp_logging_data()
    if told.get("has_rebuilt_buckets"):
        buckets = tuple(
            tuple(map(int, bucket.split()))
            for bucket in told["rebuilt_per_bucket_param_indices"].split(",")
        )
        return BucketLayout(order=tuple(i for bucket in buckets for i in bucket), buckets=buckets)
    arrived = told.get("prev_iteration_grad_ready_order_indices", "")
    order = tuple(int(index) for index in arrived.split(",") if index)
    if sorted(order) != list(range(len(_trained(ddp)[0]))):
        return None  # the DDP has not yet run a backward with gradient reduction
    return BucketLayout(order=order, buckets=None)


def _bring(ddp: Any, layout: BucketLayout) -> BucketLayout:
    """
    Give a new DDP the bucket layout of the earlier DDP that it replaces. Return the layout that the
    new DDP has then.

    This function simulates a first backward, in which the gradients come in the order of `layout`.
    The DDP then sorts its buckets, as it does at its second forward. Raises `UsageError` if the DDP
    has other parameters or gets other buckets than before. Raises `InternalError` if the DDP does
    not sort its buckets.
    """
    parameters, sparse = _trained(ddp)
    if sorted(layout.order) != list(range(len(parameters))):
        raise UsageError(
            f"the function wrap of session.adopt has built a DDP with {len(parameters)} trained "
            f"parameters, but the first time with {len(layout.order)}: it must build the same DDP "
            "each time"
        )
    for parameter, expects_sparse in zip(parameters, sparse, strict=True):
        # DDP makes zeros for a missing dense gradient, but not for a missing sparse gradient, so
        # make these zeros here
        if expects_sparse:
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
        raise InternalError("DDP has not rebuilt its buckets after the simulated backward")
    if layout.buckets is not None and set(layout.buckets) != set(settled.buckets):
        raise UsageError(
            f"the function wrap of session.adopt has built a DDP whose {len(settled.buckets)} "
            f"gradient buckets differ from the {len(layout.buckets)} buckets of the first DDP: it "
            "must build the same DDP each time"
        )
    return settled


def _trained(ddp: Any) -> tuple[list[Tensor], list[bool]]:
    """
    Return the trained parameters of `ddp` in the order of DDP's indices, and for each parameter
    whether its gradient is sparse.
    """
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse


# Any: the methods of DDP's reducer have no types
def _pretend_backward(reducer: Any, order: Sequence[int]) -> None:
    """
    Tell DDP's reducer that the gradients of the parameters have been computed, one by one, in the
    order `order`.

    The reducer must be told during a backward, because only the callbacks of a backward complete
    the all-reduces. A backward through the parameters would call the user's hooks and write
    gradients. So this function runs a backward through a separate tensor.
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
    Return a process group of this rank alone, in which an all-reduce is a copy.
    """
    group = dist.ProcessGroup(HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
