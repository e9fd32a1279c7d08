"""
Lets accelerate prepare the model without DDP, and builds the DDP for tft as accelerate would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def without_ddp(accelerator: Any) -> Iterator[None]:  # Any: accelerate has no types
    """
    Within the `with` block, `accelerator.prepare` prepares a model as usual, but does not wrap it
    in a DDP.
    """
    prepare_model = accelerator.prepare_model

    def prepare(model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        return prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare
    try:
        yield
    finally:
        del accelerator.prepare_model


def wrapper(accelerator: Any, model: nn.Module) -> Callable[[], nn.Module]:
    """
    Return a function that builds the DDP around `model` with the settings of `accelerator`.
    """

    def build() -> nn.Module:
        handler = accelerator.ddp_handler
        settings = {} if handler is None else handler.to_kwargs()
        if accelerator.device.type != "cpu":
            here = accelerator.local_process_index
            settings |= {"device_ids": [here], "output_device": here}
        built = DistributedDataParallel(model, **settings)
        if handler is not None:
            handler.register_comm_hook(built)
        return built

    return build
