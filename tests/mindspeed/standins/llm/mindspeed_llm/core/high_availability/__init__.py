"""
The functions of the high availability that the training program calls.
"""

from mindspeed_llm.core.high_availability.elastic import register_callbacks
from mindspeed_llm.core.high_availability.groups import tft_is_arf_reboot_node
from mindspeed_llm.core.high_availability.register import (
    tft_init_controller_processor,
    tft_register_processor,
    tft_train,
)

__all__ = [
    "register_callbacks", "tft_init_controller_processor", "tft_is_arf_reboot_node", "tft_register_processor",
    "tft_train",
]  # fmt: skip
