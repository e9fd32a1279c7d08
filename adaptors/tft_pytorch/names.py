"""
The names of a model's tensors.

They are the names in torch's own `get_state_dict`: without the `module.` that each DDP adds to the
names inside it, and without the `_orig_mod.` that `torch.compile` adds. A checkpoint is loaded into
models that have no such wrapper.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

_COMPILED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the module that it was given."""
ADDED = frozenset({"module", _COMPILED})
"""The words that wrappers add to names. A module of the user's may also be called `module`."""


def own_names(model: nn.Module) -> Callable[[str], str]:
    """
    Return a function that removes from a name the words that wrappers have added.
    """
    added = [
        (f"{name}." if name else "", f"{word}.")
        for name, module in model.named_modules()
        for word in _added_by(module)
    ]

    def own(name: str) -> str:
        for before, word in reversed(added):  # innermost first: `before` has the outer words
            if name.startswith(before + word):
                name = before + name.removeprefix(before + word)
        return name

    return own


def _added_by(module: nn.Module) -> Iterator[str]:
    if isinstance(module, DDP):
        yield "module"
    elif (
        _COMPILED in module._modules
    ):  # its class is in torch._dynamo, which takes a second to import
        yield _COMPILED


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """
    Return the parameters by the model's own names; a tied parameter appears once.
    """
    own = own_names(model)
    return {own(name): parameter for name, parameter in model.named_parameters()}


def parameter_names(model: nn.Module) -> dict[object, str]:
    """
    Return the model's own name of each parameter, by parameter.
    """
    return {parameter: name for name, parameter in named_parameters(model).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """
    Return the buffers by the model's own names. Buffers that `state_dict` leaves out are included.
    """
    own = own_names(model)
    return {own(name): buffer for name, buffer in model.named_buffers()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """
    Return the parameters and all buffers of a model, by name (`model.…`).

    A tied parameter appears once. Buffers that `state_dict` leaves out are included.
    """
    return {
        f"model.{name}": tensor.detach()
        for named in (named_parameters(model), named_buffers(model))
        for name, tensor in named.items()
    }
