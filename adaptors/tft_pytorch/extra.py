"""
Keeps the extra states of modules. An extra state has values other than parameters and buffers that
a module returns from `get_extra_state`, such as counters or the scales of 8-bit numbers.

An extra state usually changes in the forward pass, so it is part of the rank-local state.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from tft.errors import MalformedMessage, UsageError
from tft.spi import pack
from tft_pytorch.memory import readable
from tft_pytorch.names import own_names
from tft_pytorch.tensor_metadata import dtype_name
from tft_pytorch.trees import Disassembly, Plain, put_together

LIMIT = 128 * 1024
"""The most bytes that the extra states of all modules together may have. There is a limit because
extra states are copied at every step. The limit is half of the space for the rank-local state."""
SUFFIX = "_extra_state"
"""torch's own name for an extra state in a `state_dict`."""


class ExtraStates:
    """
    Reads and restores the extra states of a model's modules.
    """

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._places: dict[str, torch.device] = {}
        """Maps each kind of device to the first device of this kind that the model uses."""
        self._settled: dict[str, Any] | None = None

    def watch(
        self, model: nn.Module, left_out: Callable[[nn.Module], bool] = lambda _: False
    ) -> None:
        """
        Keep the extra states of the modules of `model` from now on, except those of modules for
        which `left_out` returns True.

        Raises `UsageError` for an extra state that cannot be kept or cannot be restored.
        """
        own = own_names(model)
        self._modules = {
            own(name): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
            and not left_out(module)
        }
        self._places = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._places.setdefault(tensor.device.type, tensor.device)
        for name, module in self._modules.items():
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise UsageError(
                    f"{_called(name, module)} has get_extra_state() but no set_extra_state(), so "
                    "its state could not be restored after a fault. Give the module both methods, "
                    "or keep this state in buffers"
                )
        self.noted()

    def let_go(self) -> None:
        """
        Drop the references to the modules of the model, because the modules may refer to process
        groups.
        """
        self._modules = {}

    def content(self) -> dict[str, Any]:  # Any: a module may return any value
        """
        Return the present extra states by the names of their modules, as the modules return them.
        """
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def noted(self, *, closing: bool = False) -> tuple[dict[str, Any] | None, int]:
        """
        Return the present extra states as plain values for `put_back`, and their size in bytes.
        Return None and 0 if no module has an extra state.

        Pass `closing=True` when a step is complete: `rewind` then restores the state of this call.
        Raises `UsageError` for an extra state that cannot be kept, or if all extra states together
        exceed `LIMIT` bytes.
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
                    f"with {_called(name, module)}, the extra states of modules (get_extra_state) "
                    f"have more than {LIMIT} bytes, too many to keep at every step: keep this "
                    "state in buffers, which may have any size"
                )
        if closing:
            self._settled = found
        return found, size

    def put_back(self, noted: object) -> None:
        """
        Restore the extra states that an earlier call of `noted` returned, on this rank or another
        one. Modules that are not in `noted` keep their present extra state.

        A tensor that was on a device comes to the device of the present tensor of its name, because
        the devices of two ranks may have different numbers. If there is no present tensor on a
        device of this kind, the tensor comes to the model's first device of this kind.

        Raises `MalformedMessage` if `noted` cannot be read.
        """
        if noted is None:
            return
        if not isinstance(noted, dict):
            raise MalformedMessage(
                "the extra states of modules in the rank-local state must be a dict, by module name"
            )
        for name, told in noted.items():
            if name in self._modules:
                module = self._modules[name]
                module.set_extra_state(_together(told, self._present(name, module)))
        self._settled = noted

    def _present(self, name: str, module: nn.Module) -> Callable[[str, str], torch.device]:
        """
        Return a function that returns the device to which `put_back` puts a tensor of the extra
        state of `module`. The function takes the name of the tensor and its earlier device.
        """
        kept = Disassembly()
        with suppress(UsageError):  # the present extra state may be of a type that cannot be kept
            kept.take_apart(module.get_extra_state(), entry(name))

        def device(called: str, before: str) -> torch.device:
            kind = torch.device(before).type
            there = kept.tensors.get(called)
            if kind == "cpu":
                return torch.device(kind)
            if there is not None and there.device.type == kind:
                return there.device
            return self._places.get(kind, torch.device(before))

        return device

    def rewind(self) -> None:
        """
        Restore the extra states of the modules as they were at the end of the last complete step.
        """
        self.put_back(self._settled)

    def forget(self) -> None:
        """
        Forget the state that `rewind` would restore, because the state of this rank now comes from
        another rank or a checkpoint. Until `put_back` is called or a step is complete, `rewind`
        does nothing.
        """
        self._settled = None


def entry(name: str) -> str:
    """
    Return torch's name for the extra state of the module `name` in the model's `state_dict`.
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
            f"{_called(name, module)} has a get_extra_state() that cannot be kept: {error}. Return "
            "only such values from get_extra_state(), or keep this state in buffers"
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


# Any: unpacked from a message
def _together(told: Any, place: Callable[[str, str], torch.device]) -> object:
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, device, content) in told["tensors"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if content:
            source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensor = source.view(tensor.dtype).view(shape)
        tensors[name] = tensor.to(place(name, device))
    return put_together(told["tree"], tensors)
