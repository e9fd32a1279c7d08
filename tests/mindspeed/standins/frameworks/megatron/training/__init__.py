"""
A stand-in for the parts of `megatron.training` that MindSpeed-LLM's high availability uses.

The installed megatron-core contains only `megatron.core`. This directory on `sys.path` adds the
rest of the namespace.
"""

from megatron.training.global_vars import get_args, get_timers

__all__ = ["get_args", "get_timers"]
