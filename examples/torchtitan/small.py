"""
A small Llama 3 with made-up tokens for TorchTitan: `--module small --config small_llama`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.trainer import Trainer

VOCABULARY = 2048


class MadeUpTokens(IterableDataset):  # type: ignore[type-arg]  # the wheel has no types
    """
    Sequences of tokens that depend on their number and on the rank only. It has a position.
    """

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self._length = length
        self._rank, self._ranks = rank, ranks
        self._taken = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            seed = self._taken * self._ranks + self._rank
            generator = torch.Generator().manual_seed(seed)
            first = torch.randint(VOCABULARY, (), generator=generator)
            drawn = torch.randint(3, (self._length + 1,), generator=generator)
            tokens = (first + drawn.cumsum(0)) % VOCABULARY
            self._taken += 1
            positions = torch.arange(self._length)
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Go to a position.
        """
        self._taken = state["taken"]


class MadeUpLoader(ParallelAwareDataloader):  # type: ignore[misc]  # the wheel has no types
    """
    A loader of `MadeUpTokens`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **others: Any,
    ) -> None:
        super().__init__(
            MadeUpTokens(seq_len, dp_rank, dp_world_size),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]  # the wheel has no types
    """
    Stands for a tokenizer: the tokens are made up.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def parallelize(model: Any, **settings: Any) -> Any:  # Any: the wheel has no types
    """
    Cut up the model as TorchTitan does, and let it reduce gradients with an ordinary sum: the
    backend gloo has no sum that multiplies before (`PREMUL_SUM`).
    """
    model = parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def small_llama() -> Trainer.Config:
    """
    Return the settings of a Llama 3 of two layers, on two replicas of a model that two ranks share.
    """
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    spec.parallelize_fn = parallelize
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=MadeUpLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3, fused=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=32,
            steps=20,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=2, spmd_backend="partial_dtensor"
        ),
        activation_checkpoint=None,
        comm=CommConfig(trace_buf_size=0),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(interval=5, last_save_model_only=False),
        validator=Validator.Config(freq=5, steps=2, dataloader=MadeUpLoader.Config()),
        debug=DebugConfig(seed=0),
    )
