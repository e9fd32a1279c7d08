"""
The functions by which an orchestrator (the manager of a cluster) calls the controller.

The names of the functions are those of `mindio_ttp.controller_ttp.ttp_mindx_api` in the library
MindIO TFT 7.3.0. Every function returns 0 if the controller has accepted the call. It returns 1 if
the arguments are not valid, or if the controller cannot carry out the call.
"""

from collections.abc import Callable
from typing import Any

import structlog

from mindio_ttp.constants import RET_ERROR as RET_ERROR
from mindio_ttp.constants import RET_OK as RET_OK
from mindio_ttp.orchestrator import REPORTS, orchestrator

log = structlog.get_logger()

FAULT_TYPES = (0, 1, 2)
STRATEGIES = (
    "retry", "recover", "downgrade", "upgrade", "dump", "exit", "migration", "continue",
)  # fmt: skip
WITH_PARAMETER = ("downgrade", "upgrade")
LONGEST_PARAMETER = 1023
ACTIONS = ("hot switch", "stop switch")


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """
    Register the function `func` for the reports of the controller that have the name `action`.
    `func` is called once for each such report.

    The names of reports, with the arguments that `func` gets, are
    `report_fault_ranks(ranks, error_codes)`, `report_stop_complete(code, message, ranks)`,
    `report_strategies(ranks, strategies)` and `report_result(code, message, ranks, strategy)`.
    Register functions for all four reports before the controller is started.
    """
    if action not in REPORTS or not callable(func):
        return _refused("tft_register_mindx_callback", f"{action!r} with {func!r}")
    orchestrator.register(action, func)
    return RET_OK


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """
    Report faults that the cluster has detected, or pause training.

    If `stop_type` is `stop`, `fault_ranks` has the faults: it maps a rank to its type of fault (0
    memory, 1 process, 2 network). If `stop_type` is `pause`, all ranks wait between two steps, for
    at most `timeout` seconds. Raises `TypeError` for a pause whose `timeout` is not a whole number
    of seconds, 0 or more.
    """
    call = "tft_notify_controller_stop_train"
    if stop_type == "pause":
        if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
            raise TypeError(f"{call}: a pause needs a timeout in seconds, not {timeout!r}")
        return orchestrator.call("pause_train", timeout)
    if stop_type != "stop":
        return _refused(call, f"stop_type {stop_type!r}")
    if not _are_faults(fault_ranks):
        return _refused(call, f"fault_ranks {fault_ranks!r}")
    return orchestrator.call("stop_train", fault_ranks)


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """
    Report all faults that the cluster knows. `fault_ranks` maps a rank to its type of fault (0
    memory, 1 process, 2 network).

    `time` is the number of seconds that network links need until they work again (1 to 3600).
    """
    call = "tft_notify_controller_on_global_rank"
    if not _are_faults(fault_ranks) or not _is_settling_time(time):
        return _refused(call, f"{fault_ranks!r} with time {time!r}")
    return orchestrator.call("on_global_rank", fault_ranks, time)


def tft_notify_controller_prepare_action(
    action: str, fault_ranks: dict[int, int] | None = None
) -> int:
    """
    Start or cancel the preparation of second processes, which are to take the places of the present
    processes of some ranks.

    With the action `hot switch`, a second process is prepared for each rank in `fault_ranks` while
    the rank trains. With the action `stop switch`, the preparation is cancelled.
    """
    if action not in ACTIONS or not _are_faults(fault_ranks or {}):
        return _refused("tft_notify_controller_prepare_action", f"{action!r}, {fault_ranks!r}")
    return orchestrator.call("prepare_action", action, fault_ranks or {})


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """
    Choose one of the recovery strategies that the controller has offered. The strategy `continue`
    ends a pause instead.

    The strategies `downgrade` and `upgrade` (train on with fewer ranks, or with all ranks again)
    need the argument `params`, a text of 1 to 1023 characters.
    """
    call = "tft_notify_controller_change_strategy"
    if strategy in WITH_PARAMETER and not 1 <= len(params) <= LONGEST_PARAMETER:
        return _refused(call, f"{strategy} needs params of 1 to {LONGEST_PARAMETER} characters")
    # The strategy is not checked here, because only the controller knows the offered strategies.
    return orchestrator.call("change_strategy", strategy)


def tft_notify_controller_dump() -> int:
    """
    Make the controller save a last checkpoint and end the job.
    """
    return orchestrator.call("dump")


def _are_faults(ranks: Any) -> bool:  # Any: the argument is not yet checked
    return isinstance(ranks, dict) and all(
        isinstance(rank, int) and 0 <= rank < orchestrator.world and kind in FAULT_TYPES
        for rank, kind in ranks.items()
    )


def _is_settling_time(seconds: Any) -> bool:  # Any: the argument is not yet checked
    return isinstance(seconds, int) and 1 <= seconds <= 3600


def _refused(call: str, what: str) -> int:
    log.warning("call_not_followed", call=call, what=what)
    return RET_ERROR
