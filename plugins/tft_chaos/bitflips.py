"""
Finds the tensor that `bitflip` changes, and changes it: a part of the training state between two
steps, or a gradient during the backward pass.

As in `injection_points.py`, the objects are assumed to be torch's, and torch is not imported.
"""

import ctypes
from collections.abc import Mapping

from tft_chaos import mindspore_hooks as cells
from tft_chaos.actions import ChaosMissed, Theirs
from tft_chaos.bit_patterns import Memory, choose, flipped, pattern_of
from tft_chaos.injection_points import Blow, own_part
from tft_chaos.spec import Bitflip


def flip_state(blow: Blow, action: Bitflip, model: Theirs, optimizer: Theirs, step: int) -> None:
    """
    Flip bits of the training state between two steps, if this firing is not recorded already.

    Raises `ChaosMissed` if this rank has no such state.
    """
    cell = cells.is_cell(model)
    names, held = (cells.state_of if cell else _state_of)(action.part, model, optimizer)
    name, tensor = choose(action, names, held, action.part)
    _strike(blow, action, name, _memory(tensor, cell=cell), step)


def watch_gradient(blow: Blow, action: Bitflip, model: Theirs) -> None:
    """
    Flip bits of a gradient that this rank's backward pass has computed, before the gradient is
    added to others and before it is reduced with those of other ranks.

    The hook is that of the parameter's gradient itself. Wrappers start their reduction in later
    hooks. Where a wrapper trains other tensors than the model's parameters, such as FSDP, the hook
    is not called, and `missed_gradient` says so. Raises `ChaosMissed` if the model has no such
    parameter.
    """
    session = blow.session
    cell = cells.is_cell(model)
    held = {p.name: p for p in model.trainable_params()} if cell else _trained(model)
    name, parameter = choose(action, list(held), held, action.part)
    pattern_of(action, _memory(parameter, cell=cell))  # refused now, not in the middle of training

    def came(gradient: Theirs) -> Theirs:
        if session.evaluating or not blow.due(session.step):
            return None
        if getattr(parameter, "grad_added_to_main_grad", False):
            raise ChaosMissed(
                f"chaos: the backward pass adds the gradient of {name} to main_grad itself "
                "(gradient_accumulation_fusion), so it cannot be changed before"
            )
        if getattr(gradient, "is_sparse", False):
            raise ChaosMissed(f"chaos: the gradient of {name} is sparse")
        # not in place: autograd may use the same memory for another gradient
        changed = gradient.copy() if cell else gradient.clone()
        _strike(blow, action, name, _memory(changed, cell=cell), session.step)
        return changed

    parameter.register_hook(came)


def missed_gradient(blow: Blow, step: int) -> None:
    """
    Raise `ChaosMissed` if the gradient should have been changed in `step`, whose update is made.
    """
    if blow.due(step):
        raise ChaosMissed(
            f"chaos: {blow.spec.text}: no backward pass of step {step} has computed this gradient "
            "of a parameter of the model, so no bit was flipped"
        )


def _strike(blow: Blow, action: Bitflip, name: str, memory: Memory, step: int) -> None:
    pattern = pattern_of(action, memory)
    content = flipped(memory.read(), memory.itemsize, pattern)
    evidence = {
        "target": action.part,
        "tensor": name,
        "dtype": memory.dtype,
        "of": memory.size,
        "elements": {
            "first": pattern.first,
            "number": pattern.number,
            "period": pattern.period,
        },
        "bits": list(pattern.bits),
    }
    if blow.enter(step, evidence):
        memory.write(content)


def _memory(tensor: Theirs, *, cell: bool) -> Memory:
    return cells.ArrayMemory(tensor.asnumpy()) if cell else TensorMemory(tensor)


class TensorMemory:
    """
    The memory of this rank's part of a tensor of torch.
    """

    def __init__(self, tensor: Theirs) -> None:
        self._own = own_part(tensor)
        self.dtype = str(self._own.dtype).removeprefix("torch.")
        self.itemsize: int = self._own.element_size()
        self.size: int = self._own.numel()

    def largest(self) -> int:
        """
        Return the element with the largest absolute value.
        """
        # torch has no `abs` for the types of one byte
        values = self._own.float() if self.itemsize == 1 else self._own
        return int(values.abs().argmax())

    def read(self) -> bytes:
        """
        Return the content, in row-major order.
        """
        copy = self._host_copy()
        return ctypes.string_at(copy.data_ptr(), self.size * self.itemsize)

    def write(self, content: bytes) -> None:
        """
        Replace the content in place, whatever the strides of the tensor are.
        """
        copy = self._host_copy()
        ctypes.memmove(copy.data_ptr(), content, len(content))
        self._own.copy_(copy)

    def _host_copy(self) -> Theirs:
        return self._own.cpu().contiguous().clone()


def _state_of(
    part: str, model: Theirs, optimizer: Theirs
) -> tuple[list[str], Mapping[str, Theirs]]:
    """
    Return the names of the model's trained parameters (or buffers), and, by these names, the
    tensors of the state `part` that this rank has. Tensors without elements are left out.
    """
    tensors = dict(model.named_buffers()) if part == "buffer" else _trained(model)
    if part in ("param", "buffer"):
        found = tensors
    elif part == "master":
        found = {name: _master(optimizer, each) for name, each in tensors.items()}
    else:
        found = {name: _kept(optimizer, each).get(part) for name, each in tensors.items()}
    held = {
        name: each for name, each in found.items() if each is not None and own_part(each).numel()
    }
    return list(tensors), held


def _trained(model: Theirs) -> dict[str, Theirs]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _master(optimizer: Theirs, parameter: Theirs) -> Theirs:
    """
    Return the 32-bit master of a parameter, or this rank's share of it. None if this rank has none.

    A `tft_pytorch.ReplicaOptimizer` has a method for it. Megatron's optimizers leave it at the
    parameter.
    """
    if hasattr(optimizer, "master"):
        return optimizer.master(parameter)
    return getattr(parameter, "main_param", None)


def _kept(optimizer: Theirs, parameter: Theirs) -> Mapping[str, Theirs]:
    """
    Return the state that the optimizer keeps for a parameter on this rank; empty if it keeps none.

    The optimizer has it under the master, the parameter, or a share of the parameter: Megatron's
    distributed optimizer updates views of 32-bit parameters.
    """
    state = (optimizer.optim if hasattr(optimizer, "optim") else optimizer).state
    for key in (_master(optimizer, parameter), parameter):
        if key is not None and key in state:
            found: Mapping[str, Theirs] = state[key]
            return found
    own = own_part(parameter)
    begin, end = own.data_ptr(), own.data_ptr() + own.numel() * own.element_size()
    shares = (
        kept
        for key, kept in state.items()
        if hasattr(key, "data_ptr") and begin <= own_part(key).data_ptr() < end
    )
    return next(shares, {})
