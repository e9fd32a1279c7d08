"""
Watches the training state while a function of the user runs that must not change it, such as an
evaluation.

Some evaluations change parameters for a moment: they put averaged weights into the model, and put
the weights of training back at the end. If an exception leaves such a function, for example because
another rank was killed, the averaged weights stay in the model. This module notices that, and puts
a copy of the parameters back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tft.spi import Made, pack
from tft_pytorch.trees import Disassembly

_SAMPLED = 32
"""The number of parameters of which elements are read, to notice a function that writes through
`parameter.data`. torch does not count these writes."""
_ELEMENTS = 16
"""The number of elements that are read of each of these parameters."""
_SHARDED = "_get_fsdp_state"
"""An attribute that the modules of FSDP2 have. To import their class takes long."""


class Guard:
    """
    Watches the parameters, and the settings of optimizers and schedulers, of the objects in `made`.

    A copy of the parameters is kept if it has at most `room` bytes.
    """

    def __init__(self, made: Made, room: int) -> None:
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """Where the parameters are: the dict of a module, the name in it, and the parameter."""
        self._parameters: dict[int, nn.Parameter] = {}
        for module in (made.model, *made.others.values()):
            if isinstance(module, nn.Module):
                self._watch(module)
        self._values = [_local(each).detach() for each in self._parameters.values()]
        """The parameters' own memory, also if a function makes them refer to other memory."""
        self._marks = self._marked()
        self._host = all(each.device.type == "cpu" for each in self._values)
        self._samples = self._sampled()
        self._settings = _settings_of(made)
        self._before = {name: _plain(read) for name, read in self._settings.items()}
        fits = sum(each.nbytes for each in self._values) <= room
        self._copies = [each.to("cpu", copy=True) for each in self._values] if fits else None
        self._written: bool | None = None
        """Whether the function has written to the parameters, when this is settled; until then
        None."""

    def _watch(self, module: nn.Module) -> None:
        if any(hasattr(each, _SHARDED) for each in module.modules()):
            # FSDP2 replaces the parameters in its modules for each forward pass. The parameters that
            # it gathers are copies, of which the memory is freed later
            own = {id(p): p for p in module.parameters() if isinstance(p, DTensor)}
            self._parameters |= own
            return
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    self._slots.append((owner._parameters, name, parameter))
                    self._parameters[id(parameter)] = parameter

    def changed(self) -> Sequence[str]:
        """
        Return the names of the settings that differ from those before the call.
        """
        return [
            name
            for name, read in self._settings.items()
            if not _same(_plain(read), self._before[name])
        ]

    def written(self) -> bool:
        """
        Return whether the function has written to the parameters. Before `settle`, do not wait for a
        device.
        """
        if self._written is None:
            return self._moved() or (self._host and self._differ())
        return self._written

    def settle(self) -> None:
        """
        Put the copy of the parameters back if the function has written to them. The devices must
        have done their work. Then drop all references to the user's objects.

        If a device cannot be read, because its context is lost, the function counts as one that has
        written.
        """
        if self._written is not None:
            return
        written = True
        with suppress(RuntimeError):
            written = self._moved() or self._differ()
            if written and self._copies is not None:
                self._put_back(self._copies)
        self.end()
        self._written = written

    def end(self) -> None:
        """
        Drop the copy, and all references to the user's objects.
        """
        self._slots, self._parameters, self._values = [], {}, []
        self._settings, self._copies, self._samples = {}, None, []
        self._written = False

    def _marked(self) -> list[tuple[int, int, int]]:
        return [
            (own.data_ptr(), each._version, own._version)
            for each in self._parameters.values()
            for own in (_local(each),)
        ]

    def _moved(self) -> bool:
        """
        Return whether a parameter refers to other memory, was changed in a way that torch counts, or
        was replaced in its module.
        """
        replaced = any(owner.get(name) is not each for owner, name, each in self._slots)
        return replaced or self._marked() != self._marks

    def _sampled(self) -> list[Tensor]:
        """
        Return some elements of some parameters, as one tensor for each kind of them.
        """
        full = [each for each in self._values if each.numel() and each.itemsize > 1]
        found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for value in full[:: max(1, len(full) // _SAMPLED)]:
            if value.is_contiguous():
                flat = value.view(-1)
                some = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]
                found.setdefault((value.device, value.dtype), []).append(some)
        return [torch.cat(each).view(torch.uint8) for each in found.values()]

    def _differ(self) -> bool:
        pairs = zip(self._sampled(), self._samples, strict=True)
        return any(not torch.equal(now, before) for now, before in pairs)

    @torch.no_grad()
    def _put_back(self, copies: Sequence[Tensor]) -> None:
        for owner, name, parameter in self._slots:
            owner[name] = parameter
        for parameter, value, copy in zip(
            self._parameters.values(), self._values, copies, strict=True
        ):
            if not isinstance(parameter, DTensor) and parameter.data_ptr() != value.data_ptr():
                # the memory to which it refers now may be that of an average, which must stay
                parameter.data = value
            value.copy_(copy)


def _local(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _settings_of(made: Made) -> dict[str, Callable[[], object]]:
    """
    Return functions that read the settings of the optimizers and the state of the schedulers, by
    name.
    """
    found: dict[str, Callable[[], object]] = {}
    optimizers: Mapping[str, Any] = {"settings": made.optimizer, **made.others}
    for name, each in optimizers.items():
        if isinstance(each, Optimizer):
            found[name] = partial(_groups, each)
    schedulers: Mapping[str, Any] = {"scheduler": made.scheduler, **made.others}
    for name, each in schedulers.items():
        if isinstance(each, LRScheduler) or (name == "scheduler" and each is not None):
            found[name] = each.state_dict
    return found


def _groups(optimizer: Optimizer) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _plain(read: Callable[[], object]) -> tuple[bytes, dict[str, Tensor]]:
    kept = Disassembly()
    plain = pack(kept.take_apart(read(), ""))
    return plain, {name: tensor.detach().clone() for name, tensor in kept.tensors.items()}


def _same(one: tuple[bytes, dict[str, Tensor]], other: tuple[bytes, dict[str, Tensor]]) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())
    )
