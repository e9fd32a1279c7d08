"""
Finds the names of a model's parameters and buffers, without the words that wrappers add.

The names are those in torch's own `get_state_dict`: without the `module.` that each DDP adds to the
names inside it, and without the `_orig_mod.` that `torch.compile` adds. So a checkpoint can be
loaded into a model that has no such wrapper.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

_COMPILED = "_orig_mod"
"""The attribute in which `torch.compile` keeps the original module."""
ADDED = frozenset({"module", _COMPILED})
"""The words that wrappers add to names. The user's own modules may have the name `module` too, so a
word is removed only where a wrapper has added it."""


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
        # Wrappers add words such as `_orig_mod` to a name. Remove the word of the innermost wrapper
        # first: `before`, the name up to that word, still has the words of the outer wrappers, so
        # it fits only while these have not been removed.
        for before, word in reversed(added):
            if name.startswith(before + word):
                name = before + name.removeprefix(before + word)
        return name

    return own


def _added_by(module: nn.Module) -> Iterator[str]:
    if isinstance(module, DDP):
        yield "module"
    # no isinstance, because importing the class of torch.compile takes 1 s
    elif _COMPILED in module._modules:
        yield _COMPILED


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """
    Return the parameters of `model` by name, without the words that wrappers add. A tied parameter
    appears once.
    """
    own = own_names(model)
    return {own(name): parameter for name, parameter in model.named_parameters()}


def parameter_names(model: nn.Module) -> dict[object, str]:
    """
    Return a dict from each parameter of `model` to the name of the parameter. The names are without
    the words that wrappers add.
    """
    return {parameter: name for name, parameter in named_parameters(model).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """
    Return the buffers of `model` by name, without the words that wrappers add. Buffers that
    `state_dict` leaves out are included.
    """
    own = own_names(model)
    return {own(name): buffer for name, buffer in model.named_buffers()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """
    Return the parameters and all buffers of `model`, by name (`model.…`).

    A tied parameter appears once. Buffers that `state_dict` leaves out are included.
    """
    return {
        f"model.{name}": tensor.detach()
        for named in (named_parameters(model), named_buffers(model))
        for name, tensor in named.items()
    }
