"""
Functions by which a training program reports when its updates begin and end. These times decide
whether lost device memory can be restored from other ranks.

The names of the functions are those of `mindio_ttp.utils` in the library MindIO TFT 7.3.0.
"""

from mindio_ttp.utils.uce_utils import (
    get_l2_hbm_error_time as get_l2_hbm_error_time,
)
from mindio_ttp.utils.uce_utils import (
    tft_can_do_uce_repair,
    tft_set_update_end_time,
    tft_set_update_start_time,
)

__all__ = [
    "tft_can_do_uce_repair",
    "tft_set_update_end_time",
    "tft_set_update_start_time",
]
