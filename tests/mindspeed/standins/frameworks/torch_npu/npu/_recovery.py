"""
The replacement of a tensor's lost memory by sound memory.
"""

import torch

safe: list[int] = []
"""For tests: the sizes of the tensors that got sound memory."""


def update_npu_tensor_to_safe(tensor: torch.Tensor) -> None:
    """
    Give the tensor sound memory. Its previous values are lost.
    """
    safe.append(tensor.numel())
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
