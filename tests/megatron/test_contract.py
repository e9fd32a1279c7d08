"""
Tests that the adaptor for Megatron keeps the contract that holds for every adaptor.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import tft_megatron
import torch
from megatron.core.num_microbatches_calculator import (
    get_current_running_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from tests.megatron import shim
from tests.megatron.gpt import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    add_arguments,
    build,
    forward,
    samples,
    sizes,
)
from tft.testing.contract import AdaptorContract, Training
from tft.testing.contract_ranks import Update


class MegatronTraining(Training):
    """
    A small GPT whose distributed optimizer has two instances: each shard has two holders or more.

    The training has the members of `tft.Session` that `tft_megatron.begin` and `enable` use.
    """

    adaptor = "megatron"

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._parts: dict[str, Any] = {}  # Any: the objects that `enable` hands over
        self._update: Update | None = None
        self._numbers = count(1)

    def adopt(self, **parts: Any) -> None:
        """
        Keep what `tft_megatron.enable` hands over.
        """
        self._parts = parts

    @contextmanager
    def update(self) -> Iterator[None]:
        """
        Open the window of the contract suite where Megatron's `optimizer.step` opens one.
        """
        assert self._update is not None
        with self._update():
            yield

    def parts(self) -> Mapping[str, Any]:
        """
        Build the model in the order of a script of Megatron, once in a process.
        """
        if not self._parts:
            self._build()
        return {name: part for name, part in self._parts.items() if part is not None}

    def _build(self) -> None:
        torch.set_num_threads(1)
        shim.install()
        instances = 2 if self.world > 1 else 1
        args = add_arguments(argparse.ArgumentParser()).parse_args(["--instances", str(instances)])
        tft_megatron.begin(self, **sizes(args))
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        self._built = build(args)
        init_num_microbatches_calculator(self.rank, None, GLOBAL_BATCH, MICRO_BATCH, self.world)
        self._data = tft_megatron.Data(samples)
        torch.manual_seed(100 + self.rank)  # dropout differs between ranks
        built = self._built
        tft_megatron.enable(self, built.wrapped, built.optimizer, built.scheduler, data=self._data)

    def step(self, model: object, update: Update) -> object:
        """
        Train one step, with the calls of Megatron's own `train_step`.
        """
        del model  # not needed, because Megatron's wrapper stays the same object
        self._update = update
        built = self._built
        built.wrapped.zero_grad_buffer()
        built.optimizer.zero_grad()
        step_forward_backward = partial(get_forward_backward_func(), forward_step_func=forward)
        losses = step_forward_backward(
            data_iterator=self._data.begin(next(self._numbers)),
            model=[built.wrapped],
            num_microbatches=get_num_microbatches(),
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        done, norm, _ = built.optimizer.step()
        assert done
        built.scheduler.step(increment=get_current_running_global_batch_size())
        return [float(each["loss"]).hex() for each in losses], float(norm).hex()

    def damage(self) -> None:
        """
        Change one master weight. Damaged parameters would not last: every incident computes them
        anew from the master weights.
        """
        inner = self._built.optimizer.chained_optimizers[0].optimizer
        with torch.no_grad():
            inner.param_groups[0]["params"][0].view(-1)[0] += 1.0


class TestMegatron(AdaptorContract):
    """
    The contract tests, run with two ranks that hold the same shards.
    """

    training = MegatronTraining
    world = 2


@pytest.mark.soak
class TestShardedMegatron(AdaptorContract):
    """
    The contract tests, run with four ranks, two of which hold the same share of the optimizer.
    """

    training = MegatronTraining
    world = 4
