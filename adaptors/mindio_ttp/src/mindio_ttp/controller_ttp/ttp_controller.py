"""
Starts and ends the controller.

The names of the functions are those of `mindio_ttp.controller_ttp.ttp_controller` in the library
MindIO TFT 7.3.0. If `tft_init_controller` gets rank -1, `tft_start_controller` starts the
controller, and the ranks join the controller later. With any other rank the controller starts
together with the job, in `tft_start_processor`. With any rank, the controller is a separate
process, and outlives the process that has started it.
"""

from mindio_ttp import checks
from mindio_ttp.checks import Refused
from mindio_ttp.constants import RET_ERROR as RET_ERROR
from mindio_ttp.constants import RET_K8S as RET_K8S
from mindio_ttp.constants import RET_OK as RET_OK
from mindio_ttp.orchestrator import orchestrator
from mindio_ttp.processor import curve, processor


def tft_init_controller(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """
    Set the rank of this process and the number of ranks of the job (`world_size`), before
    `tft_start_controller` is called.

    Call this function in the process of rank 0, or with rank -1 in a process that trains nothing.
    The other arguments are checked, but not used. Raises `Refused` for an argument out of its
    range. In a program for MindSpore, also raises `Refused` if `enable_local_copy` or `enable_zit`
    is True.
    """
    call = "tft_init_controller"
    checks.rank_and_world(call, rank, world_size, least=-1)
    for name, value in (
        ("enable_local_copy", enable_local_copy),
        ("enable_arf", enable_arf),
        ("enable_zit", enable_zit),
    ):
        if (
            checks.flag(call, name, value)
            and name != "enable_arf"
            and processor.variables.mindspore
        ):
            raise Refused(f"{call}: {name} must be False with MindSpore")
    orchestrator.init(rank, world_size)


def tft_start_controller(
    bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = ""
) -> None:
    """
    Start the controller at `bind_ip` and `port`, or connect to the controller that was started with
    the job.

    The controller is started if `tft_init_controller` was called with rank -1. If `enable_tls` is
    True, the bus is encrypted with keys that are derived from the private key in `tls_info`. Raises
    `Refused` for arguments that are not valid, or if the started controller does not answer.
    """
    call = "tft_start_controller"
    address = checks.address(call, "bind_ip", bind_ip)
    checks.port(call, port)
    options = curve(checks.flag(call, "enable_tls", enable_tls), tls_info)
    orchestrator.start(address, port, options, processor.variables.task)


def tft_destroy_controller() -> None:
    """
    End the connection of this process to the controller, and the controller itself if this process
    has started it.

    A controller whose job is running is not ended at once: it ends when that job is over.
    """
    orchestrator.destroy()


def tft_query_high_availability_switch() -> bool:
    """
    Return whether this process is connected to a controller that answers.
    """
    return orchestrator.call("hello") == 0
