"""
The same with tft:

    tft run --nproc-per-node 4 train_tft.py --module small --config small_llama
"""

import cpu  # noqa: F401 (before TorchTitan)
from tft_torchtitan import main

main()
