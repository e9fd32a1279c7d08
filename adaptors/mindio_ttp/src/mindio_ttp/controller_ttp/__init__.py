"""
The functions that start and end the controller. Also the functions by which an orchestrator (the
manager of a cluster) calls the controller.

The names, arguments and results of the functions are those of `mindio_ttp.controller_ttp` in the
library MindIO TFT 7.3.0.
"""

from mindio_ttp.controller_ttp.ttp_controller import (
    tft_destroy_controller as tft_destroy_controller,
)
from mindio_ttp.controller_ttp.ttp_controller import (
    tft_init_controller as tft_init_controller,
)
from mindio_ttp.controller_ttp.ttp_controller import (
    tft_query_high_availability_switch,
)
from mindio_ttp.controller_ttp.ttp_controller import (
    tft_start_controller as tft_start_controller,
)
from mindio_ttp.controller_ttp.ttp_mindx_api import (
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_prepare_action,
    tft_notify_controller_stop_train,
    tft_register_mindx_callback,
)

__all__ = [
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
]
