"""
The adaptor for TorchTitan. It stands on the adaptor for PyTorch.

    tft run --nproc-per-node 8 train.py --module llama3 --config llama3_8b

where `train.py` is

    from tft_torchtitan import main

    main()
"""

from tft_torchtitan.entry import main, train

__all__ = ["main", "train"]
