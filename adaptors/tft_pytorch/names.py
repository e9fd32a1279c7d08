"""
What the tensors of a model are called: as torch's own `get_state_dict` has them, without the `module.` that
each DDP adds to what is in it, and the `_orig_mod.` that `torch.compile` adds. A checkpoint is read into
models that have no such wrapper.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

_COMPILED = "_orig_mod"
"""Where `torch.compile` keeps the module that it was given."""
ADDED = frozenset({"module", _COMPILED})
"""Words that wrappers add to names. A module of the user's may be called `module`, too."""


def own_names(model: nn.Module) -> Callable[[str], str]:
    """
    A function that takes what wrappers have added out of a name.
    """
    added = [
        (f"{name}." if name else "", f"{word}.")
        for name, module in model.named_modules()
        for word in _added_by(module)
    ]

    def own(name: str) -> str:
        for before, word in reversed(added):  # the innermost first: the others stand before it
            if name.startswith(before + word):
                name = before + name.removeprefix(before + word)
        return name

    return own


def _added_by(module: nn.Module) -> Iterator[str]:
    if isinstance(module, DDP):
        yield "module"
    elif (
        _COMPILED in module._modules
    ):  # its type is in torch._dynamo, which takes a second to import
        yield _COMPILED


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """
    As the model's own, tied ones once.
    """
    own = own_names(model)
    return {own(name): parameter for name, parameter in model.named_parameters()}


def parameter_names(model: nn.Module) -> dict[object, str]:
    """
    The names by parameter.
    """
    return {parameter: name for name, parameter in named_parameters(model).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """
    As the model's own, also those that `state_dict` leaves out.
    """
    own = own_names(model)
    return {own(name): buffer for name, buffer in model.named_buffers()}
