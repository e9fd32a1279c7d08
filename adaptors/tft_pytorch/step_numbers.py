"""
Notes the numbers of each step, for plugins that look for NaN, Inf or spikes. The numbers are the
losses from which the backward passes begin, and the norm of the reduced gradients.

torch has no hook that reports losses or norms. So this module replaces three functions of torch
when it begins to note numbers:

- the function that begins a backward pass;
- the function with which `clip_grad_norm_` computes the norm. So if a script clips its gradients
  with `clip_grad_norm_`, their norm is computed once, not twice;
- the function with which all functions that clip gradients group them first. So the norm is noted
  before `clip_grad_value_` or `clip_grads_with_norm_` changes the gradients, even if the script has
  imported these functions by name.

This module also replaces `GradScaler.scale`, to refuse a `GradScaler` that the script has not handed
to tft.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from tft.errors import UsageError
from tft.spi import Made, Numbers
from tft_pytorch.auxiliary_state import parameters_beside

_NORM = "_get_total_norm"
"""The function of `torch.nn.utils.clip_grad` that computes the norm of gradients. If a version of
torch lacks this function, `_GROUPED` notes the norm, and the norm is computed twice."""
_GROUPED = "_group_tensors_by_device_and_dtype"
"""The function by which `torch.nn.utils.clip_grad` groups gradients before it clips them or computes
their norm. If a version of torch lacks this function, the norm may be computed after the gradients
were clipped."""


class Watch:
    """
    Notes the numbers of the present step: its losses and the norm of its gradients. All methods
    except `forget` are called on the training thread only.
    """

    def __init__(self) -> None:
        self._refuse: Callable[[float], bool] | None = None
        self._made: Callable[[], Made | None] = lambda: None
        self._thread = 0
        self._native: dict[str, Any] = {}  # Any: functions of torch
        self._computing = False
        """True while torch computes the norm of all gradients. This computation calls `_grouped`,
        which must not compute the norm a second time."""
        self.forget()

    def begin(self, refuse: Callable[[float], bool], made: Callable[[], Made | None]) -> None:
        """
        Note the losses and gradient norms of each step from now on. `refuse` takes a loss, and
        returns True if no rank may apply the update (see the hook `tft_watch_numbers`). `made`
        returns the objects of the user, or None while these objects do not exist.
        """
        self._refuse, self._made, self._thread = refuse, made, threading.get_ident()
        if not self._native:
            self._native["backward"] = torch.autograd.backward
            torch.autograd.backward = self._backward
            self._native["scale"] = GradScaler.scale
            GradScaler.scale = self._scale_of()  # type: ignore[method-assign]
            norm = getattr(clip_grad, _NORM, None)
            if norm is not None:
                self._native["norm"] = norm
                setattr(clip_grad, _NORM, self._total_norm)
            grouped = getattr(clip_grad, _GROUPED, None)
            if grouped is not None:
                self._native["grouped"] = grouped
                setattr(clip_grad, _GROUPED, self._grouped)

    def forget(self) -> None:
        """
        Drop the numbers of a step that was not finished, and all references to the user's objects.
        """
        self._model: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        """The parameters of the model `_model`, whose gradients were read last."""
        self._beside: list[nn.Parameter] = []
        """The parameters that may be trained in addition to those of the model `_model`."""
        self.begin_step()

    def begin_step(self) -> None:
        """
        Begin to note the numbers of the next step. Drop the numbers that were noted until now,
        which belong to the last step, or to backward passes after its update window.
        """
        self._losses: list[float] = []
        self._pending: list[Tensor] = []
        """Losses on a device. The method `take` reads these losses, when the device has done its
        work."""
        self._own: list[Tensor] = []
        self._norm: Tensor | None = None
        """The norm of all gradients of the model before they were clipped."""
        self._clipped: list[Tensor] = []
        """The norms of the gradients of `_beside`, each before some of these were clipped."""

    def own(self, gradient: Tensor) -> None:
        """
        Note the norm of `gradient`. This rank has computed the gradient alone: no all-reduce has
        changed it yet.
        """
        if self._refuse is not None and gradient.layout == torch.strided:
            # `take` reads the number, when the code that reads a tensor is in the caches
            self._own.append(torch.linalg.vector_norm(gradient.detach()))

    def take(self) -> Numbers:
        """
        Return the numbers of the present step (its losses and the norm of its gradients), and
        forget them.
        """
        made = self._made()
        scaler = None if made is None else scaler_of(made)
        for loss in self._pending:
            self._see(loss, scaler)
        norm = self._norm if self._norm is not None else _norm_of(self._gradients())
        found = None if norm is None else _unscaled(norm.item(), made, scaler)
        # a GradScaler handles gradients that overflow itself
        if scaler is None and (self._beside or self._clipped):
            found = self._wrong_beside() or found
        numbers = Numbers(
            losses=tuple(self._losses), norm=found, own=tuple(each.item() for each in self._own)
        )
        self.begin_step()
        return numbers

    # ---------------------------------------------------------------- functions in place of torch's

    def _backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any) -> Any:
        if threading.get_ident() == self._thread and grad_tensors is None:
            # a norm that was noted earlier does not include the gradients of this backward pass, so
            # drop it
            self._norm = None
            found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            losses = [each for each in found if isinstance(each, Tensor) and each.numel() == 1]
            refused = [self._begins(loss) for loss in losses]
            if any(refused) and len(losses) == len(found):
                tensors = found
                grad_tensors = [torch.full_like(loss, float("nan")) for loss in losses]
        return self._native["backward"](tensors, grad_tensors, *args, **named)

    def _scale_of(self) -> Callable[..., Any]:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            made = self._made()
            if scaler.is_enabled() and made is not None and scaler_of(made) is None:
                raise UsageError(
                    "a GradScaler scales the loss, but session.adopt was not given this "
                    "GradScaler, so its overflows would be taken for faults. Give session.adopt "
                    "others={'scaler': scaler}, or run without --numerics"
                )
            return self._native["scale"](scaler, outputs)

        return scale

    def _begins(self, loss: Tensor) -> bool:
        """
        Note a loss. Return whether the gradients of the backward pass from this loss must become
        NaN.
        """
        if not loss.is_cpu:  # takes a tenth of the time of `loss.device.type`
            self._pending.append(loss.detach())
            return False
        made = self._made()
        scaler = None if made is None else scaler_of(made)
        # A GradScaler would take NaN for an overflow of its scale. So with a GradScaler, the
        # pre-update barrier tells all ranks of the refusal.
        return self._see(loss, scaler) and scaler is None

    def _see(self, loss: Tensor, scaler: GradScaler | None) -> bool:
        value = loss.item()
        if scaler is not None:
            if value in (float("inf"), float("-inf")):
                # the scaled loss has overflowed, so the GradScaler skips the step itself. The loss
                # is noted, because the places of the other losses in the step count
                self._losses.append(value)
                return False
            value /= scaler.get_scale()
        overflowed = bool(self._losses) and math.inf in map(abs, self._losses)
        self._losses.append(value)
        return self._refuse is not None and not overflowed and self._refuse(value)

    def _total_norm(self, tensors: Any, norm_type: float = 2.0, *args: Any, **named: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._native["norm"](tensors, norm_type, *args, **named)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        is_all = self._norm is None and norm_type == 2.0 and self._are_all(tensors)
        if not is_all:
            self._note_before_clipping(tensors)
        self._computing = True
        try:
            found: Tensor = self._native["norm"](tensors, norm_type, *args, **named)
        finally:
            self._computing = False
        if is_all:
            self._norm = _local(found).detach()
        return found

    def _grouped(self, groups: Sequence[Sequence[Tensor]], *args: Any, **named: Any) -> Any:
        mine = not self._computing and threading.get_ident() == self._thread
        if mine and (self._norm is None or self._beside):
            tensors = [each for group in groups for each in group]
            self._note_before_clipping(tensors)
            self._note_beside(tensors)
        return self._native["grouped"](groups, *args, **named)

    def _note_before_clipping(self, tensors: Sequence[Tensor]) -> None:
        """
        Note the norm of all gradients of the model now, unless it was noted before, if some of them
        are in `tensors`, because the script is about to clip these.
        """
        if self._norm is None and _overlap(tensors, self._gradients()):
            self._norm = _norm_of(self._gradients())

    def _note_beside(self, tensors: Sequence[Tensor]) -> None:
        """
        Note the norm of the gradients of `_beside` now if some of them are in `tensors`, because
        the script is about to clip these. Clipping by value makes a finite number of Inf.
        """
        gradients = _gradients_of(self._beside)
        norm = _norm_of(gradients) if _overlap(tensors, gradients) else None
        if norm is not None:
            self._clipped.append(norm)

    # ---------------------------------------------------------------- gradients

    def _are_all(self, tensors: Sequence[Tensor]) -> bool:
        """
        Return whether `tensors` are the gradients of all parameters that have a gradient, in the
        order of the parameters.
        """
        known = self._parameters
        # if there are as many tensors as parameters, comparing the first and the last one is enough
        if known and len(tensors) == len(known):
            return tensors[0] is known[0].grad and tensors[-1] is known[-1].grad
        gradients = self._gradients()
        return len(tensors) == len(gradients) and all(
            one is other for one, other in zip(tensors, gradients, strict=True)
        )

    def _gradients(self) -> list[Tensor]:
        made = self._made()
        if made is None:
            return []
        # list the parameters only once for each model, because listing takes 100 us
        if made.model is not self._model:
            self._model, self._parameters = made.model, list(made.model.parameters())
            self._beside = parameters_beside(made)
        return _gradients_of(self._parameters)

    def _wrong_beside(self) -> float | None:
        """
        Return the norm of the gradients of `_beside` if it is NaN or Inf, now or before some of
        them were clipped. Otherwise return None.

        Whether a norm of these gradients is a spike is not judged. They may be trained only in some
        steps, and what is left in them of a backward pass for the model may differ between ranks.
        """
        last = _norm_of(_gradients_of(self._beside)) if self._beside else None
        norms = [norm.item() for norm in (*self._clipped, last) if norm is not None]
        return next((norm for norm in norms if not math.isfinite(norm)), None)


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [grad for each in parameters if (grad := each.grad) is not None]


def _overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return not {id(each) for each in some}.isdisjoint(id(each) for each in others)


@torch.no_grad()
def _norm_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """
    Return the norm of `gradients` together, or None if there are none.
    """
    parts = [_dense(_local(each)) for each in gradients]
    if not parts:
        return None
    device = parts[0].device
    if any(part.device != device for part in parts):
        norms = [_vector_norm(part).to(device) for part in parts]
    elif all(part.dtype == torch.float32 for part in parts):
        norms = list(torch._foreach_norm(parts))
    else:
        norms = [_vector_norm(part) for part in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _vector_norm(part: Tensor) -> Tensor:
    """
    Return the norm of a tensor as a number of 32 bits. A norm of 16 bits could overflow even if no
    gradient has overflowed.
    """
    half = part.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float32 if half else None)
    return norm.float()


watch = Watch()
"""The object that notes the losses and gradient norms of this process."""


def scaler_of(made: Made) -> GradScaler | None:
    """
    Return the `GradScaler` that the user has handed over, if this `GradScaler` is enabled.
    Otherwise return None.
    """
    for other in made.others.values():
        if isinstance(other, GradScaler) and other.is_enabled():
            return other
    return None


def _unscaled(norm: float, made: Made | None, scaler: GradScaler | None) -> float | None:
    """
    Return the norm of the gradients without the scale of a `GradScaler`.

    Return None if a `GradScaler` is in use and the gradients have overflowed. The `GradScaler` then
    skips the update on all ranks.
    """
    if scaler is None or made is None:
        return norm
    if not norm < float("inf"):
        return None
    state = scaler._per_optimizer_states.get(id(made.optimizer))
    unscaled = state is not None and state["stage"].name == "UNSCALED"
    return norm if unscaled else norm / scaler.get_scale()


def _local(tensor: Tensor) -> Tensor:
    """
    Return this rank's part of `tensor` if the tensor is distributed. Return any other tensor as it
    is.
    """
    return (
        tensor if type(tensor) is Tensor or not isinstance(tensor, DTensor) else tensor.to_local()
    )


def _dense(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient
