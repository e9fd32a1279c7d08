"""
Parts of the test jobs: batches with a position, and the record of the whole state of a rank.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tft

WIDTH = 8


class Batches:
    """
    Batches of one rank, drawn from its own generator.
    """

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self._taken = 0

    def next(self) -> Tensor:
        """
        Return the next batch, of shape (4, WIDTH).
        """
        self._taken += 1
        return torch.randn(4, WIDTH, generator=self._generator)

    def state_dict(self) -> dict[str, object]:
        """
        Return the position: the number of batches taken and the state of the generator.
        """
        return {"taken": self._taken, "generator": self._generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: values of any type
        """
        Set the position to the one in `state`.
        """
        self._taken = state["taken"]
        self._generator.set_state(
            torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8)
        )


def averaged(model: nn.Module) -> AveragedModel:
    """
    Return a moving average of the parameters of `model`.
    """
    towards: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]  # torch has no types here
    return AveragedModel(model, multi_avg_fn=towards)


def whole(tensors: Mapping[str, Tensor]) -> str:
    """
    Return a digest of the content of some tensors.
    """
    found = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def whole_state(
    session: tft.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,  # Any: torch's schedulers have no common class
    average: nn.Module | None,
    scaler: GradScaler,
) -> dict[str, str]:
    """
    Return the whole state of a rank: the digests of tft, and the state that is read from the
    objects themselves. `model` is the model without its wrapper.
    """
    moments = {
        f"{number}.{name}": value
        for number, kept in optimizer.state_dict()["state"].items()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }
    mean = {} if average is None else dict(average.named_parameters())
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return {
        **session.digests(),
        "weights": whole(dict(model.named_parameters())),
        "buffers": whole(dict(model.named_buffers())),
        "modes": json.dumps([module.training for module in model.modules()]),
        "trained": json.dumps([each.requires_grad for each in model.parameters()]),
        "extra": repr({k: v for k, v in model.state_dict().items() if k.endswith("_extra_state")}),
        "moments": whole(moments),
        "groups": repr(groups),
        "schedule": "" if scheduler is None else repr(scheduler.state_dict()),
        "averaged": whole(mean),
        "scale": repr(scaler.state_dict()),
        "generator": whole({"torch": torch.get_rng_state()}),
    }
