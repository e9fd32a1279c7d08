"""
The adaptor for PyTorch: data-parallel training with DistributedDataParallel over gloo, models that a factory
makes over the groups, and what scripts use of it.
"""

from tft.hooks import Made
from tft_pytorch.replicas import ReplicaOptimizer

__all__ = ["Made", "ReplicaOptimizer"]
