"""
A placeholder for MindSpeed's parameters that share memory with their 32-bit copies.
"""

from collections.abc import Callable
from typing import Any


def reuse_fp32_param_distrib_optimizer_init_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Refuse the call: no test uses this feature.
    """
    raise NotImplementedError("reuse_fp32_param is not in the stand-in for MindSpeed")
