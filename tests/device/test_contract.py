"""
The contract suite on the adaptor for PyTorch, over the test device.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.contract.trainings import TorchTraining
from tests.device.group import install
from tests.device.stream import stream
from tft.testing.contract import AdaptorContract
from tft.testing.contract_ranks import Update


class DeviceTraining(TorchTraining):
    """
    The training of the contract suite for PyTorch, whose optimizer steps on the device.
    """

    def parts(self) -> Mapping[str, Any]:
        """
        Return the parts. Gradients are views of DDP's buckets, so that the device writes them.
        """
        install()
        parts = super().parts()
        model = parts["model"]
        return {
            **parts,
            "wrap": lambda: DistributedDataParallel(model, gradient_as_bucket_view=True),
        }

    def step(self, model: DistributedDataParallel, update: Update) -> object:
        """
        Train one step. The host waits for the device before the forward pass.
        """
        stream.synchronize()
        loss = model(self._data.next()).square().mean()
        loss.backward()
        told = loss.item()
        with update():
            stream.submit(self._optimizer.step)
            stream.submit(self._scheduler.step)
            stream.submit(self._optimizer.zero_grad)
        return told.hex()


@pytest.mark.soak
class TestDevice(AdaptorContract):
    """
    The contract of the adaptor for PyTorch on an asynchronous device.
    """

    training = DeviceTraining
