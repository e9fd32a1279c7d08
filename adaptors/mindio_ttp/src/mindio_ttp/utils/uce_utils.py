"""
Decides whether memory that a device has lost can be restored from the copies on other ranks.

If the memory error came before the last update began, the error may have changed the gradients that
the all-reduce gave to all ranks. Then every copy of the training state is wrong.
"""

import re
from typing import Any

from mindio_ttp import device, environment
from mindio_ttp.checks import Refused

TIME_US_PATTERN = r"time us=\s*(\d+)"
"""The pattern that finds the time of a device error, in microseconds, in the message of the error.
torch_npu (PyTorch's extension for Ascend NPUs) writes a space before the number."""


START, END = "START_TIME", "END_TIME"
TRAIN_STEP_TIME: dict[str, int] = {}
"""The times at which the last update of the optimizer began (`START`) and ended (`END`), in
microseconds by the clock of the device. 0 means that the time is not known."""
mind_spore = environment.variables().mindspore
"""True if the environment variable MINDIO_FOR_MINDSPORE says that the program uses MindSpore."""


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """
    Set the time at which the last update began, in microseconds by the clock of the device.

    None stands for the present time. If the device has no clock that can be read, 0 is set.
    """
    TRAIN_STEP_TIME[START] = _time("tft_set_update_start_time", start_time)


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """
    Set the time at which the last update ended, in microseconds by the clock of the device.

    None stands for the present time. If the device has no clock that can be read, 0 is set.
    """
    TRAIN_STEP_TIME[END] = _time("tft_set_update_end_time", end_time)


def tft_can_do_uce_repair(
    hbm_error_time: int, start_time: int | None = None, end_time: int | None = None
) -> bool:
    """
    Return True if a memory error at `hbm_error_time` cannot have changed the copies on other ranks,
    because it came after the last update began.

    `start_time` and `end_time` are the times at which the last update began and ended. If one of
    them is None, use the time that was set last. Return False if any of the three times is not
    known.
    """
    start = TRAIN_STEP_TIME.get(START) if start_time is None else start_time
    end = TRAIN_STEP_TIME.get(END) if end_time is None else end_time
    return _can_do_repair(hbm_error_time, start, end)


def get_l2_hbm_error_time(log_string: str) -> int | None:
    """
    Return the time of a memory error from the text of the error, in microseconds by the clock of
    the device. Return None if the text has no time.
    """
    match = re.search(TIME_US_PATTERN, log_string)
    return int(match[1]) if match else None


def get_event_time() -> int:
    """
    Return the present time by the clock of the device, in microseconds. Return 0 if the device has
    no clock that can be read.
    """
    return device.time_now()


def get_update_start_end_time() -> tuple[int | None, int | None]:
    """
    Return the times at which the last update began and ended. A time that was not set is None.
    """
    return TRAIN_STEP_TIME.get(START), TRAIN_STEP_TIME.get(END)


def _can_do_repair(hbm_error_time: int, start_time: int | None, end_time: int | None) -> bool:
    if not hbm_error_time or not start_time or not end_time:
        return False
    during = start_time < hbm_error_time < end_time
    return during or hbm_error_time > max(start_time, end_time)


def _time(function: str, value: Any) -> int:  # Any: `value` is not checked yet
    if value is None:
        return device.time_now()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused(f"{function}: a time must be a number of microseconds, but is {value!r}")
    return value
