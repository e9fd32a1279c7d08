"""
What modules keep beside parameters and buffers and tell by `get_extra_state`: counters, the scales of
8-bit numbers. It changes in the forward pass as a rule, so it is the rank's private state.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tft.errors import MalformedMessage, UsageError
from tft.protocol.codec import pack
from tft_pytorch.described import dtype_name
from tft_pytorch.memory import readable
from tft_pytorch.names import own_names
from tft_pytorch.trees import Disassembly, Plain, put_together

LIMIT = 128 * 1024
"""Bytes of it that are kept at every step, all modules together. Half of what the private state has room for."""
SUFFIX = "_extra_state"
"""torch's own name for it in a `state_dict`."""


class ExtraStates:
    """
    Those of a model's modules, and their way back.
    """

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._settled: dict[str, Any] | None = None

    def watch(self, model: nn.Module) -> None:
        """
        The modules of this model from now on. Raises `UsageError` for a state that cannot be kept.
        """
        own = own_names(model)
        self._modules = {
            own(name): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        for name, module in self._modules.items():
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise UsageError(
                    f"{_called(name, module)} has get_extra_state() and no set_extra_state(): what it tells "
                    "could not be put back after a fault. Give it both, or keep this state in buffers"
                )
        self.noted()

    def let_go(self) -> None:
        """
        Of the model.
        """
        self._modules = {}

    def content(self) -> dict[str, Any]:  # Any: whatever modules keep
        """
        The present states by the names of their modules, as these tell them.
        """
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def noted(self, *, closing: bool = False) -> tuple[dict[str, Any] | None, int]:
        """
        The present states as plain values, for `put_back`, and their size; None where no module has any.
        `closing`: a step is complete, and `rewind` is to come back to here. Raises `UsageError` for what
        cannot be kept.
        """
        if not self._modules:
            return None, 0
        found: dict[str, Any] = {}
        size = 0
        for name, module in self._modules.items():
            found[name] = _apart(name, module)
            size += len(pack(found[name]))
            if size > LIMIT:
                raise UsageError(
                    f"the extra states of modules (get_extra_state) have more than {LIMIT} bytes with that of "
                    f"{_called(name, module)}, which is too much to be kept at every step: keep this state in "
                    "buffers, which may have any size"
                )
        if closing:
            self._settled = found
        return found, size

    def put_back(self, noted: object) -> None:
        """
        What they were. Modules that were not there then keep what they have.
        """
        if noted is None:
            return
        if not isinstance(noted, dict):
            raise MalformedMessage("private state with extra states that cannot be read")
        for name, told in noted.items():
            if name in self._modules:
                self._modules[name].set_extra_state(_together(told))
        self._settled = noted

    def rewind(self) -> None:
        """
        Back to the end of the last complete step.
        """
        self.put_back(self._settled)

    def forget(self) -> None:
        """
        The state now held came from elsewhere: there is nothing to rewind to before a rollback.
        """
        self._settled = None


def entry(name: str) -> str:
    """
    What torch calls the extra state of a module in the model's `state_dict`.
    """
    return f"{name}.{SUFFIX}" if name else SUFFIX


def _called(name: str, module: nn.Module) -> str:
    return f"the module {name or 'that is the model'} ({type(module).__name__})"


def _apart(name: str, module: nn.Module) -> dict[str, Any]:
    kept = Disassembly()
    try:
        tree: Plain = kept.take_apart(module.get_extra_state(), entry(name))
    except UsageError as error:
        raise UsageError(
            f"{_called(name, module)} has a get_extra_state() that cannot be kept: {error}. Return such values "
            "from it, or keep this state in buffers"
        ) from None
    return {
        "tree": tree,
        "tensors": {
            called: [
                dtype_name(tensor.dtype),
                list(tensor.shape),
                str(tensor.device),
                bytes(readable(called, tensor).view),
            ]
            for called, tensor in kept.tensors.items()
        },
    }


def _together(told: Any) -> object:  # Any: came from outside
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, device, content) in told["tensors"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if content:
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensor = source.view(tensor.dtype).view(shape)
        tensors[name] = tensor.to(device)
    return put_together(told["tree"], tensors)
