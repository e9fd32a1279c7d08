"""
The replacement of a tensor's lost memory by sound memory.
"""

import torch

safe: list[int] = []
"""For tests: how large the tensors were that were given sound memory."""


def update_npu_tensor_to_safe(tensor: torch.Tensor) -> None:
    """
    Give the tensor sound memory. Its previous values are lost.
    """
    safe.append(tensor.numel())
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
