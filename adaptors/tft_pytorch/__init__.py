"""
The adaptor for PyTorch: data-parallel training with DistributedDataParallel over gloo, and models
that a factory makes over the process groups. Scripts import their part of the adaptor from here.
"""

from tft.spi import Made
from tft_pytorch.iterators import Batches, Prefetcher
from tft_pytorch.replicas import ReplicaOptimizer

__all__ = ["Batches", "Made", "Prefetcher", "ReplicaOptimizer"]
