"""
Finds the tensor that the action `bitflip` changes, and changes this tensor. It is a part of the
training state between two steps, or a gradient during the backward pass.

The functions expect objects of torch, but do not import torch: they only call methods of the
objects. For objects of MindSpore they call `mindspore_hooks.py`.
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
    Flip bits of the training state between two steps. Flip nothing if the record of faults shows
    that this fault was made already.

    Raises `ChaosMissed` if this rank does not have the state that `action` names.
    """
    cell = cells.is_cell(model)
    names, held = (cells.state_of if cell else _state_of)(action.part, model, optimizer)
    name, tensor = choose(action, names, held, action.part)
    _strike(blow, action, name, _memory(tensor, cell=cell), step)


def watch_gradient(blow: Blow, action: Bitflip, model: Theirs) -> None:
    """
    Arrange that bits of a gradient are flipped when this rank's backward pass computes it. At that
    moment the gradient is not yet accumulated, nor reduced with the gradients of other ranks.

    The change is made in a hook of the parameter itself (`register_hook`). A wrapper of the model,
    such as DistributedDataParallel, starts the reduction in other hooks, which are called later. A
    wrapper such as FSDP trains other tensors than the model's parameters. In this case the hook of
    the parameter is not called, and `missed_gradient` reports this. Raises `ChaosMissed` if the
    model does not have the parameter that `action` names.
    """
    session = blow.session
    cell = cells.is_cell(model)
    held = {p.name: p for p in model.trainable_params()} if cell else _trained(model)
    name, parameter = choose(action, list(held), held, action.part)
    # raise `ChaosMissed` now, not in the middle of training, if the parameter does not have the
    # element or the bit of `action`
    pattern_of(action, _memory(parameter, cell=cell))

    def came(gradient: Theirs) -> Theirs:
        if session.evaluating or not blow.due(session.step):
            return None
        if getattr(parameter, "grad_added_to_main_grad", False):
            raise ChaosMissed(
                "chaos: no bit was flipped: with gradient_accumulation_fusion the backward pass "
                f"itself adds the gradient of the parameter {name} to main_grad, so chaos cannot "
                "change this gradient before: train without gradient_accumulation_fusion"
            )
        if getattr(gradient, "is_sparse", False):
            raise ChaosMissed(
                f"chaos: no bit was flipped, because the gradient of the parameter {name} is "
                "sparse: choose another parameter with tensor=NAME"
            )
        # flip the bits in a copy, because autograd may use the gradient's memory for another
        # gradient
        changed = gradient.copy() if cell else gradient.clone()
        _strike(blow, action, name, _memory(changed, cell=cell), session.step)
        return changed

    parameter.register_hook(came)


def missed_gradient(blow: Blow, step: int) -> None:
    """
    Raise `ChaosMissed` if bits of a gradient should have been flipped in `step` and were not. Call
    this function when the update of `step` is done.
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
        Return the index of the element with the largest absolute value.
        """
        # convert elements of one byte, such as float8, to float32, because torch has no `abs` for
        # them
        values = self._own.float() if self.itemsize == 1 else self._own
        return int(values.abs().argmax())

    def read(self) -> bytes:
        """
        Return the content of the tensor as bytes, in row-major order.
        """
        copy = self._host_copy()
        return ctypes.string_at(copy.data_ptr(), self.size * self.itemsize)

    def write(self, content: bytes) -> None:
        """
        Replace the content of the tensor in place. The tensor may have any strides.
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
    Return the names of all trained parameters of the model, and a mapping from these names to the
    tensors that this rank has for the part `part` of the state. Tensors without elements are left
    out of the mapping.

    If `part` is `buffer`, the names and the tensors are those of the model's buffers.
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
    Return the 32-bit master weight of a parameter, or this rank's share of the master weight.
    Return None if this rank has neither.

    A `tft_pytorch.ReplicaOptimizer` has a method that returns the master weight. Megatron's
    optimizers store the master weight in the attribute `main_param` of the parameter.
    """
    if hasattr(optimizer, "master"):
        return optimizer.master(parameter)
    return getattr(parameter, "main_param", None)


def _kept(optimizer: Theirs, parameter: Theirs) -> Mapping[str, Theirs]:
    """
    Return the state that the optimizer keeps for a parameter on this rank. The result is empty if
    the optimizer keeps no state for the parameter.

    The key of this state in the optimizer is the master weight, the parameter, or a view of a share
    of the parameter. Megatron's distributed optimizer uses such views for 32-bit parameters.
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
