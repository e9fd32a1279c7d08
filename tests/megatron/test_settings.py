"""
Tests of the Megatron settings that the adaptor refuses, read from Megatron's own configurations.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from tft_megatron.settings import refuse_settings

from tft.errors import UsageError


def holders(**model: Any) -> list[Any]:  # Any: Megatron has no types
    """
    Return the three configurations of Megatron: optimizer, wrapper, and a model with these
    settings.
    """
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    for name, value in model.items():
        assert hasattr(config, name)
        # set after the constructor, which would demand further settings that need a GPU
        setattr(config, name, value)
    return [OptimizerConfig(), DistributedDataParallelConfig(), config]


def test_megatrons_default_settings_are_accepted() -> None:
    """When all settings are Megatron's defaults, or have a form that keeps no state, then they are
    accepted."""
    refuse_settings(holders())
    refuse_settings(holders(fp8="hybrid", fp8_recipe="blockwise"))
    refuse_settings(holders(moe_token_dispatcher_type="flex"))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is local, .* keeps using the process groups"),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl is transformer_engine"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8_recipe is delayed, .* has no copy"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "fp8_recipe is custom"),
        ({"fp8_param": True}, "fp8_param is set, .* scales of their own"),
        ({"fp4_param": True}, "fp4_param is set"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute is set, .* that the next pass would use"),
        ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute is set"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap is set, .* break the next pass"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            "moe_flex_dispatcher_backend is hybridep, .* the process group of that time",
        ),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is set, .* routes of tokens"),
        ({"qk_clip": True}, "qk_clip is set, .* after the update"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias is set"),
    ],
)  # fmt: skip
def test_settings_that_keep_state_without_a_replica_are_refused(
    model: dict[str, Any], sentence: str
) -> None:
    """When a setting makes a model keep state that has no replica, or that outlives an interrupted
    step, then the setting is refused by name, with the reason."""
    with pytest.raises(UsageError, match=sentence):
        refuse_settings(holders(**model))


def test_a_refused_setting_that_megatron_no_longer_has_is_reported() -> None:
    """When no configuration has a setting that would have to be refused, then an error says so:
    Megatron may have renamed it."""

    @dataclass
    class Renamed:
        qk_clipping: bool = True

    with pytest.raises(UsageError, match="this megatron-core has no such setting"):
        refuse_settings([Renamed()])
