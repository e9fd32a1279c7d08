"""
Lets TorchTitan 0.3 train on CPUs, which it does not by itself: it takes every machine for one with
a GPU. Import this module before any module of TorchTitan.
"""

from types import SimpleNamespace

import torch
import torchtitan.tools.utils as utils


class CpuDevice:
    """
    The functions that TorchTitan calls in `torch.cuda`, for a machine without a GPU.
    """

    memory = SimpleNamespace()

    @staticmethod
    def set_device(device: object) -> None:
        """
        Do nothing: there is one CPU device.
        """

    @staticmethod
    def current_device() -> int:
        """
        Return the index of the only CPU device.
        """
        return 0

    @staticmethod
    def device_count() -> int:
        """
        Return the number of CPU devices.
        """
        return 1

    @staticmethod
    def synchronize() -> None:
        """
        Do nothing: a CPU computes at once.
        """

    @staticmethod
    def get_device_name(device: object) -> str:
        """
        Return the name that TorchTitan prints.
        """
        return "CPU"

    @staticmethod
    def get_device_properties(device: object) -> SimpleNamespace:
        """
        Return the memory size that TorchTitan divides by when it prints the memory in use.
        """
        return SimpleNamespace(total_memory=1)

    @staticmethod
    def memory_stats(device: object) -> dict[str, int]:
        """
        Return no counters: torch does not count the memory of a CPU.
        """
        return dict.fromkeys(
            ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0
        )

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """
        Do nothing: torch does not count the memory of a CPU.
        """

    @staticmethod
    def empty_cache() -> None:
        """
        Do nothing: torch keeps no cache of CPU memory.
        """


def keep_timeout(timeout: object, group: object) -> None:
    """
    Stand for `torch.distributed.set_timeout`, which TorchTitan 0.3 calls after the first step, and
    which torch 2.13 does not have.
    """


torch.set_num_threads(1)
# the other modules of TorchTitan import both names from this module
utils.device_type = "cpu"
utils.device_module = CpuDevice
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = keep_timeout  # type: ignore[attr-defined]
