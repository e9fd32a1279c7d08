"""
Lists the settings of Megatron with which the adaptor cannot recover from a fault. With these
settings, Megatron keeps or changes state that the adaptor does not capture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tft.errors import UsageError

Holder = Any  # Any: a configuration object of Megatron, which gives mypy no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """
    The reason why tft refuses a setting, and the condition under which tft refuses it.
    """

    why: str
    when: Callable[[Holder, object], bool] = lambda _, value: bool(value)
    """A function that takes a configuration and the value of the setting in it, and returns whether
    the setting is refused."""


_SCALES = "TransformerEngine's 8-bit state that lives from step to step has no copy"
_GRAPH = Refused(
    why="a captured graph of a device keeps using the process groups of the time of its capture"
)
_DELAYED = Refused(why="an interrupted backward pass leaves gradients that the next pass would use")

_OFFLOADED = Refused(
    why="an interrupted pass leaves its position in a queue, where the next pass would continue"
)

REFUSED: Mapping[str, Refused] = {
    "optimizer_cpu_offload": Refused(why="the state in host memory has another form"),
    "use_precision_aware_optimizer": Refused(why="tft cannot read masters in a fused optimizer"),
    "overlap_param_gather_with_optimizer_step": Refused(
        why="other ranks would get parameters in the middle of an update"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": Refused(
        why="with this setting the script's loop, not the optimizer, copies the parameters"
    ),
    "fp8_param_gather": Refused(why="parameters of 8 bits have scales of their own"),
    "fp8_param": Refused(why="parameters of 8 bits have scales of their own"),
    "fp4_param": Refused(why="parameters of 4 bits have scales of their own"),
    "fp8_recipe": Refused(
        why=_SCALES,
        # Megatron's setting `fp8_recipe` has a value even if the setting `fp8`, which switches
        # 8-bit computation on, is not set
        when=lambda holder, value: (
            bool(getattr(holder, "fp8", None)) and value in ("delayed", "custom")
        ),
    ),
    "moe_router_enable_expert_bias": Refused(
        why="the bias is changed before the update window of the step, not in this window"
    ),
    "qk_clip": Refused(
        why="this clipping changes weights after the update window of the step, not in the window"
    ),
    "enable_cuda_graph": _GRAPH,
    "external_cuda_graph": _GRAPH,
    "cuda_graph_impl": Refused(why=_GRAPH.why, when=lambda _, value: value != "none"),
    "delay_wgrad_compute": _DELAYED,
    "defer_embedding_wgrad_compute": _DELAYED,
    "moe_shared_expert_overlap": Refused(
        why="an interrupted forward pass leaves activations that break the next pass"
    ),
    "fine_grained_activation_offloading": _OFFLOADED,
    "cpu_offloading": _OFFLOADED,
    "moe_enable_routing_replay": Refused(
        why="the recorded routes of tokens have no copy, and an interrupted pass leaves some of them "
        "to the next pass, whose micro-batches are others"
    ),
    "tp_comm_overlap": Refused(
        why="the buffers of this overlap are made once, for the first tensor-parallel group"
    ),
    "moe_flex_dispatcher_backend": Refused(
        why="the dispatcher's buffer is made once, and keeps using the process group of that time",
        when=lambda holder, value: (
            value == "hybridep" and getattr(holder, "moe_token_dispatcher_type", None) == "flex"
        ),
    ),
}
"""The settings of Megatron's configurations that tft refuses, by name."""


def refuse_settings(holders: Sequence[Holder]) -> None:
    """
    Raise `UsageError` for the first setting in the configurations `holders` that tft cannot handle.

    Also raise `UsageError` if none of the configurations has one of the settings in `REFUSED`:
    megatron-core may have renamed that setting, and the adaptor could no longer refuse it.
    """
    for setting, refused in REFUSED.items():
        having = [holder for holder in holders if hasattr(holder, setting)]
        if not having:
            raise UsageError(
                f"the adaptor megatron must know whether {setting} is set, but this megatron-core "
                "has no such setting: install a version that the adaptor was written for"
            )
        for holder in having:
            value = getattr(holder, setting)
            if refused.when(holder, value):
                raise UsageError(
                    f"{setting} is {_written(value)}, which the adaptor megatron cannot handle: "
                    f"{refused.why}. Change this setting of Megatron"
                )


def _written(value: object) -> str:
    return "set" if value is True else f"{value!s}"
