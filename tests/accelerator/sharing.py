"""
Lets ranks share one device over NCCL, which refuses two ranks of one host on one device: each rank
says that it is on a host of its own, and sockets connect the ranks.
"""

import os

import torch


def share_device() -> None:
    """
    Make this process use the first device, beside other ranks. Call this function before torch
    makes a context of the device.

    Computations are deterministic afterwards, as far as torch can compute them so.
    """
    os.environ.update(
        LOCAL_RANK="0", NCCL_HOSTID=os.environ["RANK"], NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo"
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
    torch.use_deterministic_algorithms(True, warn_only=True)
