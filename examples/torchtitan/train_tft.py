"""
The same with tft:

    tft run --nproc-per-node 4 train_tft.py --module small --config small_llama
"""

from cpu import use_cpu

use_cpu()
from tft_torchtitan import main  # noqa: E402

main()
