"""
Who has the same of which tensor, in a model that was made over groups: read from the meshes and
placements of what is distributed, and from the groups of the DDPs in the model.

What the same ranks have makes up one shard. A rank may have several: experts are on a few ranks, attention
on more, small parameters that nobody cuts up on all.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tft.errors import UsageError
from tft.protocol.codec import pack
from tft_pytorch.names import ADDED

Holders = tuple[int, ...]
"""Ranks that have the same of something, in their order."""

DENSE = "dense"
"""What every rank has the same of."""

_SPELT_OUT = 16
"""So many holders stand in the name of a shard; a file's name has room for a few times more."""


class Kinds:
    """
    The holders of each parameter and buffer of a model, by name, as this rank sees them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """
        Raises `UsageError` where nobody can say who holds what.
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
                    f"{name} is neither distributed over a mesh nor in a DDP: who has a copy of it "
                    "cannot be known. Put what is the same on several ranks into a DDP over these, or "
                    "make it a distributed tensor that is replicated"
                )
            self._of[name] = tuple(sorted(found | {rank}))
        self.everything = self._common(self._of)
        """Those who have the same of all that this rank has."""
        for name, buffer in buffers.items():
            self._of[name] = (
                tuple(sorted(same_part(buffer) | {rank}))
                if isinstance(buffer, DTensor)
                else self._common(_beside(name, parameters))
            )
        self._shapes = {name: _shapes(t) for name, t in (dict(parameters) | dict(buffers)).items()}
        self._called: dict[str, list[str]] = {}
        """The names by what they are without the words of wrappers; of those alike the longest first."""
        for name in sorted(self._of, key=lambda name: -name.count(".")):
            self._called.setdefault(".".join(_bare(name.split("."))), []).append(name)
        found_first = list(dict.fromkeys(self._of.values())) or [self.everything]
        # in this order on all ranks: those of one shard have the same in it, in the same order
        self.all: list[Holders] = sorted(found_first, key=lambda holders: -len(holders))
        """The most held first."""

    def __getitem__(self, name: str) -> Holders:
        """
        The holders of a parameter or buffer.
        """
        return self._of[name]

    def ending(self, name: str, shapes: set[torch.Size]) -> Holders | None:
        """
        Those of the parameter or buffer by whose name this one ends, whatever wrappers have added; of
        several the longest. None: there is none that has these shapes.
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
        The kind, the most held, that all of these have; None: there is none.
        """
        most = set(holders)
        return next((kind for kind in self.all if most.issuperset(kind)), None)

    def beside(self, module: str) -> Holders:
        """
        The kind of what a module keeps beside its parameters and buffers.
        """
        common = self._common(_beside(f"{module}.", self._parameters))
        return self.within(common) or self.all[0]

    def name(self, holders: Holders) -> str:
        """
        Of the shard that these hold. All of them call it so, whatever else each of them has.
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
    The ranks, as they stand in the name of a shard.
    """
    if len(holders) <= _SPELT_OUT:
        return "+".join(map(str, holders))
    return f"{holders[0]}+{xxhash.xxh32_hexdigest(pack(list(holders)))}"


def _shapes(tensor: Tensor) -> set[torch.Size]:
    """
    Of the whole, and of what this rank has of it.
    """
    return {tensor.shape, *([tensor.to_local().shape] if isinstance(tensor, DTensor) else [])}


def _bare(words: list[str]) -> list[str]:
    return [word for word in words if word not in ADDED]


def _ends(words: list[str], known: list[str]) -> bool:
    """
    Whether the words end with the known ones, with words of wrappers in between.
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
    The ranks at the same place of the mesh, but for dimensions along which it is replicated.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return set()
    place = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return {int(rank) for rank in mesh.mesh[place].reshape(-1).tolist()}


def summed(ddp: DDP) -> Iterator[nn.Parameter]:
    """
    The parameters that a DDP looks after. The experts in a model may be left out of the DDP around it.
    """
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield parameter


def _replicated(model: nn.Module) -> Iterator[tuple[Tensor, set[int]]]:
    """
    The parameters of each DDP, with the ranks of its group; inner ones come later.
    """
    for module in model.modules():
        if isinstance(module, DDP):
            ranks = set(dist.get_process_group_ranks(module.process_group))
            for parameter in summed(module):
                yield parameter, ranks


def _beside(name: str, parameters: Iterable[str]) -> list[str]:
    """
    The parameters that share the innermost module with a buffer: of whose kind the module is. All
    parameters, if no module around the buffer but the whole model has any.
    """
    known = list(parameters)
    module = name
    while module:
        module = module.rpartition(".")[0]
        found = [each for each in known if each.startswith(f"{module}.")] if module else known
        if found:
            return found
    return known
