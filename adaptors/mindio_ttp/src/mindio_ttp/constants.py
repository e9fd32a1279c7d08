"""
The constants by which programs and MindIO understand each other. Their names and values are those
of `mindio_ttp.framework_ttp` of MindIO TFT 7.3.0.
"""

from enum import Enum


class Action(Enum):
    """
    The next action of a rank, as `tft_wait_next_action` returns it: enter the training loop again,
    or end the process."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """
    The kind of parameters whose optimizer state a group of ranks holds: dense parameters or
    experts. The value is the index of the group in the list for `tft_set_optimizer_replica`.
    """

    ATTENTION = 0
    MOE = 1


class ReportState(Enum):
    """
    The reason for which a rank has left its training loop.
    """

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    """
    What a rank has to do in a repair, as its repair function is told: for example, send state,
    receive state or load a checkpoint.
    """

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class MindXAction(Enum):
    """
    The reports of the controller for which an orchestrator can register a function with
    `tft_register_mindx_callback`.
    """

    REPORT_FAULT_RANKS = "report_fault_ranks"
    REPORT_STOP_COMPLETE = "report_stop_complete"
    REPORT_STRATEGIES = "report_strategies"
    REPORT_RESULT = "report_result"


RET_OK = 0
RET_ERROR = 1
RET_K8S = 2
"""The exit code of a process after which a cluster starts the process again."""
RET_PASS = 3
RET_EXCEPTION = 4
EXIT_WAIT_TIME = 10
"""Seconds that MindIO waits before it ends a process."""


class PauseType(Enum):
    """
    How training is paused: the loop waits, or the program leaves the loop with an error.
    """

    PAUSE = 1
    RAISE = 2


LARGEST_WORLD = 100_000
LARGEST_STEP = 2**63 - 2
MOST_GROUPS = 1000
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
LONGEST_ERROR_CODE = 15
