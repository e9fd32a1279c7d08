"""
A stand-in for torch_npu on a CPU, for tests only.

It provides `torch.npu`, `device="npu"`, process groups with the backend "hccl", and the changes
that `torch_npu.contrib.transfer_to_npu` makes to `torch.cuda`.

Source for the behaviour: Ascend/pytorch, torch_npu/npu/_recovery.py and
torch_npu/distributed/distributed_c10d.py.
"""

import torch
import torch.distributed as dist

from torch_npu import cpu, hccl, npu

__version__ = "2.7.1"
__all__ = ["npu"]

torch.npu = npu  # type: ignore[attr-defined]  # torch_npu adds it
dist.reinit_process_group = hccl.reinit_process_group  # type: ignore[attr-defined]  # torch_npu adds it
cpu.install()
hccl.install()
