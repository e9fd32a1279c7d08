"""
Changes to megatron-core 0.12 that are necessary without Transformer Engine.

Importing this module makes the changes, as with MindSpeed's module of the same name.
"""

import megatron.core.fp8_utils as fp8
from torch import _dynamo


def _quantize_param_shard_impl(model_params: list[object], *_: object) -> None:
    assert not model_params, "there are no parameters in eight bits without Transformer Engine"


fp8._quantize_param_shard_impl = _quantize_param_shard_impl
_dynamo.config.disable = True  # else megatron/core/jit.py compiles its fused functions
