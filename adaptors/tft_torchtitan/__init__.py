"""
The adaptor for TorchTitan. It makes a TorchTitan training fault tolerant, and uses the adaptor for
PyTorch. A training is started like this:

    tft run --nproc-per-node 8 train.py --module llama3 --config llama3_8b

where `train.py` is

    from tft_torchtitan import main

    main()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_torchtitan.entry import main, train

__all__ = ["main", "train"]


def __getattr__(name: str) -> Any:  # Any: the attributes of a module have no common type
    """
    Return the function `name`: `main` or `train`. Their module imports torch, so it is imported
    only on first use.
    """
    if name not in __all__:
        raise AttributeError(f"module 'tft_torchtitan' has no attribute {name!r}")
    from tft_torchtitan import entry

    return getattr(entry, name)
