"""
A layer norm that megatron-core uses when Apex is importable.
"""

from typing import Any

import torch


class FusedLayerNormAffineFunction:
    """
    A layer norm with the call form of an autograd function.
    """

    @staticmethod
    def forward(*_: Any) -> None:
        """
        Do nothing; megatron-core only inspects this function's parameters.
        """

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        shape: Any,
        eps: float,
        *_: Any,
    ) -> torch.Tensor:
        """
        Return the layer norm of a tensor.
        """
        return torch.nn.functional.layer_norm(tensor, shape, weight, bias, eps)
