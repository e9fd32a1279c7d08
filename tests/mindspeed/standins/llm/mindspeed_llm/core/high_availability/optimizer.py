"""
An optimizer whose state is divided within a replica instead of within the data-parallel group.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import get_args
from mindio_ttp.framework_ttp import tft_end_updating_os, tft_start_updating_os
from mindio_ttp.utils import tft_set_update_end_time, tft_set_update_start_time

from mindspeed_llm.core.high_availability import elastic_training_common as elastic
from mindspeed_llm.core.high_availability import groups


def kind_of(params: Any) -> groups.Kind:
    """
    Return the kind, dense or experts, to which these parameters belong.
    """
    return groups.kinds[any(not getattr(param, "allreduce", True) for param in params)]


class ReplicaOptimizer(DistributedOptimizer):  # type: ignore[misc]  # Megatron has no types
    """
    The optimizer of one kind of parameters: the dense part, or the experts.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        [buffer, *_] = [each for found in named["per_model_buffers"].values() for each in found]
        self.kind = kind_of(buffer.params)
        named |= {
            "data_parallel_group": self.kind.replica,
            "data_parallel_group_gloo": self.kind.replica_gloo,
        }
        super().__init__(*arguments, **named)
        self.saves = False
        """Whether this rank writes the state of this optimizer in a last checkpoint."""

    @classmethod
    def _build_model_gbuf_range(cls, buffer: Any, bucket_index: int) -> Any:
        whole = buffer.data_parallel_group
        buffer.data_parallel_group = kind_of(buffer.params).replica
        try:
            return super()._build_model_gbuf_range(buffer, bucket_index)
        finally:
            buffer.data_parallel_group = whole

    def take_groups(self) -> None:
        """
        Use the current groups of the replica.
        """
        self.data_parallel_group = self.kind.replica
        self.data_parallel_group_gloo = self.kind.replica_gloo

    def finish_update(self) -> None:
        """
        Copy the optimizer's parameters into the model, on all ranks of the replica.
        """
        self._copy_main_params_to_model_params()
        for group in self.bucket_groups():
            if self.kind is kind_of(group.params):
                gather(group)

    def bucket_groups(self) -> list[Any]:
        """
        Return the bucket groups of the whole model.
        """
        return [
            group
            for chunk in self.model_chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """
        Return all state tensors of this rank, in the same order on all ranks with the same state.
        """
        found = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                found += [param.data, state["exp_avg"], state["exp_avg_sq"]]
        return found


def gather(group: Any) -> None:
    """
    Collect the parameters of these buckets from the ranks of a replica, so that each has the whole.
    """
    kind = kind_of(group.params)
    for bucket in group.buckets:
        holders = elastic.holders(kind)
        if holders is not None:
            whole = dist.group.WORLD if elastic.world() is None else elastic.world()
            for part, holder in zip(
                shard_buffer(bucket.param_data, len(holders)), holders, strict=True
            ):
                dist.broadcast(part, holder, group=whole)
            continue
        parts = shard_buffer(bucket.param_data, dist.get_world_size(kind.replica))
        dist.all_gather_into_tensor(
            bucket.param_data, parts[dist.get_rank(kind.replica)], group=kind.replica
        )


class ReplicaChain(ChainedOptimizer):  # type: ignore[misc]  # Megatron has no types
    """
    All optimizers of a model: the dense one, and a second one if the model has experts.
    """

    def __init__(self, chained_optimizers: list[Any]) -> None:
        super().__init__(chained_optimizers)
        self.optim_nums = len(chained_optimizers)

    def take_groups(self) -> None:
        """
        Let all optimizers use the current groups.
        """
        for optimizer in self.chained_optimizers:
            optimizer.take_groups()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """
        Update with all optimizers. The state counts as whole only after all have updated.
        """
        dist.barrier()
        tft_start_updating_os()
        tft_set_update_start_time()
        for optimizer in self.chained_optimizers:
            optimizer.optimizer.step()
        torch.cuda.synchronize()
        tft_set_update_end_time()
        tft_end_updating_os(get_args().iteration + 1)
        self.finish_update()
        return True

    def finish_update(self) -> None:
        """
        Copy the parameters of all optimizers into the model.
        """
        for optimizer in self.chained_optimizers:
            optimizer.finish_update()

    def state_dict_by_idx(self, index: int) -> Any:
        """
        Return the state that a repair sends of one optimizer in addition to its tensors.
        """
        return self.chained_optimizers[index].state_dict()

    def load_state_dict_memory(self, states: list[Any]) -> None:
        """
        Load the states of all optimizers. Raises `RuntimeError` if their number is wrong.
        """
        if len(states) != len(self.chained_optimizers):
            raise RuntimeError(
                f"{len(self.chained_optimizers)} states are expected, and not {len(states)}"
            )
        for optimizer, state in zip(self.chained_optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def save_parameter_state(self, filename: str) -> None:
        """
        Save each optimizer in its own file.

        The first rank of the data-parallel group writes, or the rank chosen for a last checkpoint.
        """
        for index, optimizer in enumerate(self.chained_optimizers):
            state = optimizer.get_parameter_state_dp_zero()
            first = dist.get_rank() == halves_first(optimizer)
            if optimizer.saves or (
                first and not any(each.saves for each in self.chained_optimizers)
            ):
                torch.save(state, f"{filename}.{index}")

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """
        Load the files that `save_parameter_state` has written.
        """
        for index, optimizer in enumerate(self.chained_optimizers):
            optimizer.load_parameter_state(
                f"{filename}.{index}", update_legacy_format=update_legacy_format
            )


def halves_first(optimizer: ReplicaOptimizer) -> int:
    """
    Return the first rank of the data-parallel group.
    """
    first: int = optimizer.kind.ranks[0]
    return first
