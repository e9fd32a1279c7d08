"""
The controller, and what manages a cluster around it.
"""

from mindio_ttp import checks
from mindio_ttp.checks import Refused
from mindio_ttp.processor import curve, processor


def tft_init_controller(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """
    What is to be started: at rank 0, or, with rank -1, in a process that trains nothing.
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
            raise Refused(f"{call}: {name} is to be False with MindSpore")
    if _state.initialised:
        raise Refused(f"{call} was called before in this process")
    _state.initialised = True


def tft_start_controller(
    bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = ""
) -> None:
    """
    Have the controller at this address. It is a process of its own beside rank 0, started with the job in
    `tft_start_processor`, and outlives rank 0.
    """
    call = "tft_start_controller"
    if not _state.initialised:
        raise Refused(f"{call}: tft_init_controller comes first")
    checks.address(call, "bind_ip", bind_ip)
    checks.port(call, port)
    curve(checks.flag(call, "enable_tls", enable_tls), tls_info)
    _state.started = True


def tft_destroy_controller() -> None:
    """
    The job ends by itself when all ranks have trained to the end: there is nothing to do.
    """
    _state.started = False


class _State:
    """
    What was called in this process.
    """

    initialised = False
    started = False


_state = _State()
