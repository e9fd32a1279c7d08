"""
The constants that training programs pass to functions of the library MindIO, or get from them.
Their names and values are those in `mindio_ttp.framework_ttp` of MindIO TFT 7.3.0.
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
    The kind of parameters whose optimizer state a group of ranks holds: dense parameters
    (`ATTENTION`) or experts (`MOE`).

    The value is the index of the group in the list that a program passes to the function
    `tft_set_optimizer_replica`.
    """

    ATTENTION = 0
    MOE = 1


class ReportState(Enum):
    """
    The reason why a rank has left its training loop, as a program passes it to the function
    `tft_report_error`. For example, `RS_UCE` is an error of the device memory.
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
    What a rank has to do in a repair: for example, send state, receive state or load a checkpoint.
    tft passes the value to the repair function that the training program has registered.
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
    The reports that the controller sends to an orchestrator (the manager of a cluster). The
    orchestrator registers a function for each report with `tft_register_mindx_callback`.
    """

    REPORT_FAULT_RANKS = "report_fault_ranks"
    REPORT_STOP_COMPLETE = "report_stop_complete"
    REPORT_STRATEGIES = "report_strategies"
    REPORT_RESULT = "report_result"


RET_OK = 0
RET_ERROR = 1
RET_K8S = 2
"""If a process ends with this exit code, the cluster (Kubernetes) starts the process again."""
RET_PASS = 3
RET_EXCEPTION = 4
EXIT_WAIT_TIME = 10
"""The seconds that the library MindIO waits before it ends a process. This package does not use the
value, and keeps it for programs that import it."""


class PauseType(Enum):
    """
    How training is paused: the training loop waits (`PAUSE`), or the program leaves the training
    loop with an error (`RAISE`).
    """

    PAUSE = 1
    RAISE = 2


LARGEST_WORLD = 100_000
LARGEST_STEP = 2**63 - 2
MOST_GROUPS = 1000
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
LONGEST_ERROR_CODE = 15
