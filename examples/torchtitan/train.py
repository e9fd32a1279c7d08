"""
Trains with TorchTitan on CPUs, without tft:

    torchrun --nproc-per-node 4 train.py --module small --config small_llama
"""

from cpu import use_cpu

use_cpu()
from torchtitan.train import main  # noqa: E402

main()
