"""
Trains with TorchTitan on CPUs, without tft:

    torchrun --nproc-per-node 4 train.py --module small --config small_llama
"""

import cpu  # noqa: F401 (before TorchTitan)
from torchtitan.train import main

main()
