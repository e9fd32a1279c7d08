"""
Finds out which ranks hold the same part of each tensor, in a model that the user's factory made
over process groups. These ranks are called the holders of the part.

The holders are read from the meshes and placements of distributed tensors, and from the groups of
the DDPs in the model. The tensors with the same holders are called a kind, and form one shard. A
rank may have several shards. For example, experts are on a few ranks, attention is on more ranks,
and small parameters that are not cut up are on all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tft.errors import UsageError
from tft.spi import pack
from tft_pytorch.names import ADDED

Holders = tuple[int, ...]
"""Ranks that hold the same part of a tensor, in ascending order."""

DENSE = "dense"
"""The name of the shard that every rank holds."""

_SPELT_OUT = 16
"""The most holders that are listed in the name of a shard. With more holders the name, which is
also a file name, would be too long."""


class TensorHolders:
    """
    The holders of each parameter and buffer of a model, by name: the ranks that hold the same part
    of the tensor as this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """
        Find the holders of all tensors of `model`. Raises `UsageError` if it cannot be known which
        ranks hold a parameter.
        """
        rank, self._world = dist.get_rank(), dist.get_world_size()
        self._parameters = list(parameters)
        in_ddp = dict(_replicated(model))
        self._of: dict[str, Holders] = {}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                found = same_part(parameter)
            elif parameter in in_ddp:
                found = in_ddp[parameter]
            else:
                raise UsageError(
                    f"the parameter {name} is neither distributed over a device mesh nor in a DDP, "
                    f"so tft does not know which ranks have a copy of {name}. Put parameters that "
                    "several ranks share into a DDP over these ranks, or make them replicated "
                    "distributed tensors"
                )
            self._of[name] = tuple(sorted(found | {rank}))
        cut_up = [each for each in parameters.values() if isinstance(each, DTensor)]
        self.column: Holders = tuple(sorted(set().union(*map(same_copy, cut_up))))
        """The ranks of this rank's model replica: the ranks from which this rank gathers parts of
        parameters to compute. Empty if no parameter is distributed."""
        self.everything = self._common(self._of)
        """The ranks that hold the same part of every parameter as this rank."""
        for name, buffer in buffers.items():
            self._of[name] = (
                tuple(sorted(same_part(buffer) | {rank}))
                if isinstance(buffer, DTensor)
                else self._common(_beside(name, parameters))
            )
        self._shapes = {name: _shapes(t) for name, t in (dict(parameters) | dict(buffers)).items()}
        self._called: dict[str, list[str]] = {}
        """The full names of parameters and buffers, by the name without the words that wrappers
        add. If several full names have the same short name, the full name with the most words comes
        first."""
        for name in sorted(self._of, key=lambda name: -name.count(".")):
            self._called.setdefault(".".join(_bare(name.split("."))), []).append(name)
        found_first = list(dict.fromkeys(self._of.values())) or [self.everything]
        # The dict `_of` has the same order on all ranks, and `sorted` keeps this order for shards
        # with equally many holders. So all holders of a shard put the same content into the shard,
        # in the same order.
        self.all: list[Holders] = sorted(found_first, key=lambda holders: -len(holders))
        """The holders of each shard of this rank. The shard with the most holders comes first."""

    def __getitem__(self, name: str) -> Holders:
        """
        Return the holders of a parameter or buffer.
        """
        return self._of[name]

    def ending(self, name: str, shapes: set[torch.Size]) -> Holders | None:
        """
        Return the holders of the parameter or buffer whose name is the end of `name`. Words that
        wrappers add to names are ignored.

        If several parameters or buffers have such a name, the longest name is used. A parameter or
        buffer fits only if each of `shapes` is the shape of the whole tensor or of this rank's
        part. Return None if no parameter or buffer fits.
        """
        words = name.split(".")
        bare = _bare(words)
        for begin in range(len(bare)):
            for known in self._called.get(".".join(bare[begin:]), ()):
                if shapes <= self._shapes[known] and _ends(words, known.split(".")):
                    return self._of[known]
        return None

    def within(self, holders: Iterable[int]) -> Holders | None:
        """
        Return the holders of the shard with the most holders, among the shards that are held only
        by ranks in `holders`. Return None if there is no such shard.
        """
        most = set(holders)
        return next((kind for kind in self.all if most.issuperset(kind)), None)

    def beside(self, module: str) -> Holders:
        """
        Return the holders of the shard in which checkpoints store the extra state
        (`get_extra_state`) of the module named `module`.
        """
        common = self._common(_beside(f"{module}.", self._parameters))
        return self.within(common) or self.all[0]

    def name(self, holders: Holders) -> str:
        """
        Return the name of the shard that `holders` hold. All holders compute the same name, even if
        they hold different other shards.
        """
        if len(holders) == self._world:
            return DENSE
        return f"part.{named_after(holders)}"

    def _common(self, names: Iterable[str]) -> Holders:
        common = set(range(self._world))
        for name in names:
            common &= set(self._of[name])
        return tuple(sorted(common))


def named_after(holders: Holders) -> str:
    """
    Return the part of a shard's name that identifies the shard's holders.

    The result lists up to 16 ranks. For more ranks, it has the first rank and a digest of all
    ranks.
    """
    if len(holders) <= _SPELT_OUT:
        return "+".join(map(str, holders))
    return f"{holders[0]}+{xxhash.xxh32_hexdigest(pack(list(holders)))}"


def _shapes(tensor: Tensor) -> set[torch.Size]:
    """
    Return the shape of the whole tensor, and the shape of this rank's part if the tensor is
    distributed.
    """
    return {tensor.shape, *([tensor.to_local().shape] if isinstance(tensor, DTensor) else [])}


def _bare(words: list[str]) -> list[str]:
    return [word for word in words if word not in ADDED]


def _ends(words: list[str], known: list[str]) -> bool:
    """
    Return whether `words` end with the words `known`. Words that wrappers add to names may be in
    between.
    """
    left = list(words)
    for wanted in reversed(known):
        while left and left[-1] != wanted and left[-1] in ADDED:
            left.pop()
        if not left or left.pop() != wanted:
            return False
    return True


def same_part(tensor: DTensor) -> set[int]:
    """
    Return the ranks that hold the same part of a distributed tensor as this rank.

    These ranks have the same coordinate in the mesh as this rank, except along dimensions in which
    the tensor is replicated. The result is empty if this rank is not in the mesh.
    """
    return _along(tensor, replicated=True)


def same_copy(tensor: DTensor) -> set[int]:
    """
    Return the ranks whose parts of a distributed tensor form, with this rank's part, one copy of
    the whole tensor.

    These ranks have the same coordinate in the mesh as this rank along all dimensions in which the
    tensor is replicated. The result is empty if this rank is not in the mesh.
    """
    return _along(tensor, replicated=False)


def _along(tensor: DTensor, *, replicated: bool) -> set[int]:
    """
    Return the ranks whose coordinates in the mesh differ from this rank's only along some
    dimensions. With `replicated=True` these are the dimensions in which the tensor is replicated,
    else all other dimensions.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return set()
    place = tuple(
        slice(None) if placement.is_replicate() == replicated else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return {int(rank) for rank in mesh.mesh[place].reshape(-1).tolist()}


def summed(ddp: DDP) -> Iterator[nn.Parameter]:
    """
    Yield the parameters whose gradients a DDP reduces.

    A DDP can be told to ignore some parameters of its model, such as the parameters of experts.
    """
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield parameter


def _replicated(model: nn.Module) -> Iterator[tuple[Tensor, set[int]]]:
    """
    Yield each parameter that is in a DDP, with the ranks of the DDP's group. If DDPs are nested,
    the outer DDP comes first.
    """
    for module in model.modules():
        if isinstance(module, DDP):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            for parameter in summed(module):
                yield parameter, ranks


def _beside(name: str, parameters: Iterable[str]) -> list[str]:
    """
    Return the names of the parameters next to the buffer `name`. These parameters decide which
    ranks hold the buffer.

    The result has all parameters in the innermost module that contains the buffer and has
    parameters.
    """
    known = list(parameters)
    module = name
    while module:
        module = module.rpartition(".")[0]
        found = [each for each in known if each.startswith(f"{module}.")] if module else known
        if found:
            return found
    return known
