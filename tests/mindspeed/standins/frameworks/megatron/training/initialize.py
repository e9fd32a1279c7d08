"""
The creation of the process groups of torch and Megatron.
"""

from datetime import timedelta

import torch.distributed as dist
from megatron.core import mpu
from megatron.training import get_args


def _initialize_distributed() -> None:
    """
    Create all process groups, with the sizes in the arguments.
    """
    args = get_args()
    dist.init_process_group(
        backend=args.distributed_backend,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
