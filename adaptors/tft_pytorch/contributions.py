"""
Computes a digest of what this rank alone contributes to the gradients of a step.

The gradient of one parameter near the input of the model is enough, because it depends on the
activations and gradients of all later layers. This file notes the gradient of the smallest of the
first few parameters, so that the digest costs next to nothing.

The gradient of a distributed parameter (DTensor) exists only after it was reduced. If the model has
no other parameters, this file notes another gradient instead: the gradient of the output of one
layer near the input, summed over all samples.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tft_pytorch.memory import flat_bytes, readable

_NEAR = 8
"""How many of the first parameters of the model are candidates. The smallest candidate is chosen,
and the digest is computed from its gradient only."""


class Contributions:
    """
    Notes the gradients of one parameter before the all-reduce changes them. In some models it notes
    the gradients of the output of one module instead. Notes nothing until the first call of
    `digest`.
    """

    def __init__(self) -> None:
        self._parameter: nn.Parameter | None = None
        self._module: nn.Module | None = None
        """The module of whose output the gradient is noted. None if the gradient of a parameter is
        noted."""
        self._handle: RemovableHandle | None = None
        self._wanted = False
        self._copy: tuple[Tensor, memoryview] | None = None
        """Host memory into which the gradient is copied, as a tensor and as a view of its bytes.
        None if the parameter is on a device."""
        self._gradients: list[Tensor] = []
        """Copies of gradients that enter the digest only at the end of the step, for example
        because they are on a device."""
        self._sum = xxhash.xxh3_64()
        self._empty = True

    def watch(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """
        Note the gradients of one of `parameters` from now on. If all of `parameters` are
        distributed, note the gradients of the output of one module of `model`. Forget the parameter
        or module of an earlier call.
        """
        self.let_go()
        trained = [p for p in parameters if p.requires_grad]
        near = [p for p in trained if not isinstance(p, DTensor)][:_NEAR]
        self._parameter = min(near, key=lambda p: p.numel(), default=None)
        if trained and not near:
            self._module = next((m for m in model.modules() if _is_leaf(m)), None)
        if self._wanted:
            self._begin()

    def let_go(self) -> None:
        """
        Drop the references to the watched parameter or module, and to the noted gradients.
        """
        if self._handle is not None:
            self._handle.remove()
        self._parameter = self._module = self._handle = self._copy = None
        self.forget()

    def digest(self) -> int | None:
        """
        Return one digest (XXH3-64) of all gradients that the watched parameter has got since the
        last call: one gradient for each backward. Return None if the parameter has got no gradient.
        Also return None at the first call, which only begins to note gradients.
        """
        if not self._wanted:
            self._wanted = True
            self._begin()
        for gradient in self._gradients:
            self._sum.update(readable("gradient", gradient).view)
        if self._empty:
            return None
        digest = self._sum.intdigest()
        self.forget()
        return digest

    def forget(self) -> None:
        """
        Drop the gradients that were noted so far, for example the gradients of a step that is given
        up.
        """
        self._gradients.clear()
        self._sum.reset()
        self._empty = True

    def _begin(self) -> None:
        if self._module is not None:
            self._handle = self._module.register_forward_hook(self._watch_output)
        parameter = self._parameter
        if parameter is None:
            return
        if parameter.device.type == "cpu":
            copy = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._copy = copy, flat_bytes(copy)
        self._handle = parameter.register_hook(self._note)  # type: ignore[no-untyped-call]  # torch ships no types for hooks

    def _watch_output(self, module: nn.Module, arguments: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad and output.dim() > 0:
            output.register_hook(self._note_output)  # type: ignore[no-untyped-call]  # torch ships no types for hooks

    def _note_output(self, gradient: Tensor) -> None:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self._note(local.detach().reshape(-1, local.shape[-1]).sum(0))

    def _note(self, gradient: Tensor) -> None:
        # note a copy of the gradient, because the all-reduce overwrites the memory of the gradient
        self._empty = False
        kept = self._copy
        if (
            kept is None
            or gradient.dtype != kept[0].dtype
            or gradient.is_sparse
            # if the gradient needs a gradient itself, autograd would record the copy below
            or gradient.requires_grad
        ):
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            # `digest` reads this copy later, because waiting for a device here is too slow
            self._gradients.append(dense.clone())
            return
        memory, view = kept
        memory.copy_(gradient)
        self._sum.update(view)


def _is_leaf(module: nn.Module) -> bool:
    """
    Return whether a module has trained parameters, and contains no other modules.
    """
    return not any(module.children()) and any(p.requires_grad for p in module.parameters())
