"""
Tests that the adaptor for MindSpore keeps the contract that holds for every adaptor.
"""

from collections.abc import Mapping
from typing import Any

import mindspore
import numpy
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from tft_mindspore import Rows, group
from tft_mindspore.memory import put

from tft.testing.contract import AdaptorContract, Training
from tft.testing.contract_ranks import Update


class MindSporeTraining(Training):
    """
    A training of a small network in PyNative mode, for the contract tests.
    """

    adaptor = "mindspore"

    def parts(self) -> Mapping[str, Any]:
        """
        Return the model, the optimizer and the data.
        """
        mindspore.set_seed(1)
        drawn = numpy.random.RandomState(1)
        rows = NumpySlicesDataset(
            {
                "wave": drawn.randn(96, 8).astype(numpy.float32),
                "kind": drawn.randint(0, 4, 96).astype(numpy.int32),
            },
            shuffle=True, num_shards=self.world, shard_id=self.rank,
        ).batch(4, drop_remainder=True)  # fmt: skip
        self._data = Rows(rows, epochs=4)
        self._network = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 4))
        self._optimizer = nn.Adam(self._network.trainable_params(), 0.01)
        loss_of = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

        def forward(wave: mindspore.Tensor, kind: mindspore.Tensor) -> mindspore.Tensor:
            return loss_of(self._network(wave), kind)

        self._gradients = mindspore.value_and_grad(forward, None, self._optimizer.parameters)
        return {"model": self._network, "optimizer": self._optimizer, "data": self._data}

    def step(self, model: Any, update: Update) -> object:  # Any: MindSpore ships no types
        """
        Train one step.
        """
        loss, gradients = self._gradients(*self._data.next())
        gradients = group().mean(gradients)
        with update():
            self._optimizer(tuple(gradients))
        return float(loss).hex()

    def damage(self) -> None:
        """
        Change one weight.
        """
        weight = self._network.trainable_params()[0]
        changed = weight.asnumpy().copy()
        changed.flat[0] += 1.0
        # changed in place, because the compiled optimizer refers to this parameter
        put({"weight": changed}, {"weight": weight})


class TestMindSpore(AdaptorContract):
    """
    The contract tests, run with the MindSpore training.
    """

    training = MindSporeTraining
