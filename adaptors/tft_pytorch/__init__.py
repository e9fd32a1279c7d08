"""
The adaptor for PyTorch. It supports data-parallel training with DistributedDataParallel, and models
that a user's factory function makes over the process groups. Training scripts import the public
names of the adaptor from this package.
"""

from tft.spi import Made
from tft_pytorch.iterators import Batches, Prefetcher
from tft_pytorch.replicas import ReplicaOptimizer

__all__ = ["Batches", "Made", "Prefetcher", "ReplicaOptimizer"]
