"""
What a training process calls. The names, arguments, ranges and results are those of MindIO TFT 7.3.0
(`mindio_ttp.framework_ttp.ttp_decorator`); every function that says nothing else returns None and raises an
`Exception` for what it cannot follow, with the reason.
"""

import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from mindio_ttp import checks, device, logs, torch_groups
from mindio_ttp.checks import Refused
from mindio_ttp.classification import OTHER, Handle
from mindio_ttp.controller_ttp.ttp_utils import is_valid_ipv4, is_zero_ip
from mindio_ttp.handler import patterns as _patterns
from mindio_ttp.handler import tft_exception_handler as tft_exception_handler
from mindio_ttp.handler import tft_register_exception_handler as tft_register_exception_handler
from mindio_ttp.processor import Told, curve, processor, register
from mindio_ttp.words import (
    EXIT_WAIT_TIME as EXIT_WAIT_TIME,
)
from mindio_ttp.words import (
    LARGEST_STEP,
    LARGEST_WORLD,
)
from mindio_ttp.words import (
    RET_ERROR as RET_ERROR,
)
from mindio_ttp.words import (
    RET_EXCEPTION as RET_EXCEPTION,
)
from mindio_ttp.words import (
    RET_K8S as RET_K8S,
)
from mindio_ttp.words import (
    RET_OK as RET_OK,
)
from mindio_ttp.words import (
    RET_PASS as RET_PASS,
)
from mindio_ttp.words import (
    Action as Action,
)
from mindio_ttp.words import (
    OptimizerType as OptimizerType,
)
from mindio_ttp.words import (
    PauseType as PauseType,
)
from mindio_ttp.words import (
    RepairType as RepairType,
)
from mindio_ttp.words import (
    ReportState as ReportState,
)

log = logs.get_logger()

ACTION_TIMEOUT = processor.variables.action_limit
"""Seconds that a function of the program may take before a line says so."""
TTP_MAX_WORLD_SIZE = LARGEST_WORLD
mindx_agent = processor.variables.task or None
"""What an orchestrator calls the job; None where there is no orchestrator."""
mind_spore = processor.variables.mindspore
"""Whether the environment says that the program is one for MindSpore."""
fault_handles: dict[str, Handle] = _patterns.handles
"""By the text that an error is searched for: what says the error's name."""
fault_types: dict[str, str] = _patterns.types
"""By the name of an error: the name of the `ReportState` it stands for."""
EXPORTS = ("MindSpeed", "MindSpeed-LLM")


# ---------------------------------------------------------------- the beginning and the end


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """
    Who this process is, and what is to be done about faults: `enable_uce` has ranks brought to one step
    in place, `enable_arf` has lost ones replaced, `enable_zit` has the job go on without them until they are
    back.
    """
    call = "tft_init_processor"
    checks.rank_and_world(call, rank, world_size)
    local_copy = checks.flag(call, "enable_local_copy", enable_local_copy)
    elastic = checks.flag(call, "enable_zit", enable_zit)
    if processor.variables.mindspore and (local_copy or elastic):
        name = "enable_local_copy" if local_copy else "enable_zit"
        raise Refused(f"{call}: {name} is to be False with MindSpore")
    if local_copy:
        log.warning("local_copy_not_made", why="lost state is had from the replicas on other ranks")
    processor.init(
        Told(
            rank=rank,
            world=world_size,
            uce=checks.flag(call, "enable_uce", enable_uce),
            arf=checks.flag(call, "enable_arf", enable_arf),
            zit=elastic,
            curve=curve(checks.flag(call, "enable_tls", enable_tls), tls_info),
        )
    )


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """
    Join the job at the controller's address. A process that no tft agent has started becomes the `tft
    run` of a node with one rank here, and that rank runs the script from its beginning: call it before
    process groups are formed.
    """
    processor.start(master_ip, port, local_ip, "mindio")


def tft_destroy_processor() -> None:
    """
    This rank has trained all it was to; returns when all have.
    """
    processor.destroy()


# ---------------------------------------------------------------- what the loop says


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """
    Who holds copies of what: a dict with `rank_list`, `replica_cnt`, `replica_shift` for each kind of
    groups, dense first, then experts.
    """
    processor.replicas(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """
    The data-parallel group of this rank, where the optimizer's groups are larger than that: who has its place
    in any such group leaves with it.
    """
    call = "tft_set_dp_group_info"
    program = processor.program
    checks.number(call, "rank", rank, 0, program.world - 1)
    ranks = checks.ranks(call, "dp_rank_list", dp_rank_list, program.world)
    if rank not in ranks:
        raise Refused(f"{call}: rank {rank} is not in dp_rank_list {dp_rank_list}")
    program.dense = ranks


def tft_start_updating_os(backup_step: int = -1) -> None:
    """
    The optimizer's state is about to be changed in place: all all-reduces of the step are complete. May wait; raises a
    `RuntimeError` with FORCE STOP when the loop is to be left. Said twice of one update it counts once.
    """
    processor.open(backup_step)


def tft_end_updating_os(step: int) -> None:
    """
    The state of `step` is whole.
    """
    processor.close(step)


def tft_start_copy_os() -> None:
    """
    A copy of the state is about to be made on this node. tft makes none of a program's own state.
    """
    processor.check_trains("tft_start_copy_os")


def tft_set_step_args(args: Any) -> None:
    """
    What is handed to every function that is registered. None is ignored.
    """
    processor.set_args(args)


def tft_pause_train(cur_step: int) -> None:
    """
    The end of an iteration. Raises a `RuntimeError` with STEP FINISH when the loop is to be left.
    """
    if checks.number("tft_pause_train", "cur_step", cur_step, -LARGEST_STEP, LARGEST_STEP) < 0:
        log.warning("pause_ignored", step=cur_step)
    else:
        processor.pause()


def tft_reset_limit_step() -> None:
    """
    Lift the limit on steps. tft lifts it when the loop is entered again.
    """


def tft_report_load_ckpt_step(step: int) -> None:
    """
    Which step a periodic checkpoint is of that the program has loaded: before it trains, or in its repair
    function, where that was told to.
    """
    processor.loaded(step)


# ---------------------------------------------------------------- faults


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """
    The loop was left, for the reason that the value of a `ReportState` says. Of what is unknown it returns
    when the job has ended for this rank.
    """
    handled = sys.exc_info()[1]  # a loop that catches its errors itself says no more than the state
    said = "" if handled is None else f"{type(handled).__name__}: {handled}"
    processor.report(checks.error(error_type, error_code), error_code, said)


def tft_wait_next_action() -> int:
    """
    Waits until this rank is to go on, 0, or to exit, 1: the values of `Action`.
    """
    return processor.wait().value


def tft_wait_repair_action() -> int:
    """
    The same; what is to be repaired is repaired meanwhile. One wait is enough here, a second one returns
    at once.
    """
    return processor.wait().value


def tft_is_reboot_node() -> bool:
    """
    Whether this process takes the place of one that was lost.
    """
    return processor.reboot


def tft_get_reboot_type() -> str:
    """
    For what reason: `arf`, it was lost, or `hot switch`.
    """
    return processor.reboot_type


def tft_get_repair_step() -> int:
    """
    The step that this rank was brought to last; 0: none.
    """
    return processor.repair_step()


def tft_get_repair_type() -> str:
    """
    What is being done: `retry`, `recover`, `dump` or `unknow`.
    """
    return processor.repair_type


def set_mindio_export_version(framework_type: str) -> None:
    """
    Say which of MindIO's users the program is: `MindSpeed` or `MindSpeed-LLM`. They stop and clean before a
    last checkpoint.
    """
    if framework_type not in EXPORTS:
        names = ", ".join(EXPORTS)
        raise Refused(f"set_mindio_export_version knows {names}, not {framework_type!r}")
    processor.export(framework_type)


def get_mindio_export_version() -> str | None:
    """
    Return what `set_mindio_export_version` was told; None where it was not called.
    """
    return processor.exported or None


def get_device() -> int | None:
    """
    Return the device that was the process's own when `tft_init_processor` was called; None without one.
    """
    return processor.device


def set_device() -> None:
    """
    Make that device the current one of the calling thread.
    """
    device.use(processor.device)


def get_stream() -> Any:  # Any: torch_npu has no types
    """
    Return a new stream of the current device; None without torch_npu.
    """
    return device.new_stream()


def handle_l2_hbm_error(err_str: str) -> str:
    """
    Return the name of an HBM MULTI BIT ECC error: whether what is lost can be had from other ranks; `OTHER`
    where `tft_init_processor` was not told to repair devices.
    """
    try:
        repairs = processor.told.uce
    except Refused:
        repairs = False
    return _patterns.hbm(err_str) if repairs else OTHER


def check_pytorch_version() -> bool:
    """
    Return whether process groups can be formed anew (`reinit_process_group`): torch_npu 2.1.0 can from its
    post11 on. True without torch_npu, and for MindSpore.
    """
    parts = [] if mind_spore else device.version().split(".")
    if parts[:3] != ["2", "1", "0"]:
        return True
    post = re.match(r"post(\d+)", "".join(parts[3:4]))
    return post is not None and int(post[1]) >= 11


# ---------------------------------------------------------------- addresses


def is_valid_ip(ip_str: str) -> bool:
    """
    Return whether this is an address of IPv4.
    """
    return is_valid_ipv4(ip_str)


def is_loopback_address(ip: str) -> bool:
    """
    Return whether this is 127.0.0.1, with however many zeros its parts are written.
    """
    network, *host = ip.split(".")
    return (
        len(ip) <= 15 and network == "127" and [part.lstrip("0") for part in host] == ["", "", "1"]
    )


def get_local_ip(master_ip: str, local_ip: str) -> str:
    """
    Return `local_ip`; where it is empty, the address by which this machine reaches `master_ip`. It stays empty
    where that is of this machine alone, no address, or not reached.
    """
    alone = is_loopback_address(master_ip) or is_zero_ip(master_ip)
    if local_ip or alone or not is_valid_ip(master_ip):
        return local_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_ip, 9))  # of UDP: chooses the interface, and sends nothing
        except OSError:
            return local_ip
        return str(probe.getsockname()[0])


# ---------------------------------------------------------------- groups of torch.distributed


def _process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """
    Return the name of the next process group of `ranks`: it carries the repair, so that survivors and
    replacements form a group of the same name.
    """
    return processor.group_names.name(ranks, use_hashed_name)


def launch_tcp_store_client(url: str, save_rank: int = -1, world_size: int = -1) -> int:
    """
    Have the default process group meet at the store at `tcp://HOST:PORT`; return 0, or 1 where no store answers
    there. tft calls it by itself when its store was started again.
    """
    place = urlsplit(url)
    try:
        torch_groups.connect(place.hostname or "", place.port or 0)
    except RuntimeError:
        log.exception("store_not_reached", url=url)
        return RET_ERROR
    return RET_OK


def launch_tcp_store_server(url: str, world_size: int) -> int:
    """
    Return 0: the store of a job is served by a process of tft's, and outlives every rank.
    """
    return RET_OK


# ---------------------------------------------------------------- functions of the program

Function = Callable[..., Any]
"""Any: a program's own."""


def tft_register_save_ckpt_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, save_info, args, ctx)` saves what this rank was chosen for.
    """
    register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, args)`, with MindSpore `func(step, ctx)`, gives the checkpoint its name when all is saved.
    """
    register("rename", func, ctx)


def tft_register_exit_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(ctx)` ends the process; MindSpore only.
    """
    register("exit", func, ctx)


def tft_register_stop_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(args, ctx)` has the training thread raise, whatever it waits in.
    """
    register("stop", func, ctx)


def tft_register_clean_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(is_uce_error, args, ctx)` says 0: clean, 1: it could not be cleaned, 2: the memory was cleaned,
    and nothing in it was lost.
    """
    register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(fault_ranks, args, ctx)` forms the process groups anew.
    """
    register("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, need_rebuild, error_ranks, repair_info, args, ctx)` sends or receives state.
    """
    register("repair", func, ctx)


def tft_register_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, args, ctx)` brings data, schedulers and counters to the end of `step`.
    """
    register("rollback", func, ctx)


def tft_register_stream_sync_handler(func: Function, ctx: Any = None) -> None:
    """
    `func()` waits for the device. Kept; not called by this version: an update ends when it is complete.
    """
    register("stream_sync", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(new_dp_ranks, new_world_ranks, args, params)`: these go on without the others; it forms groups of them,
    and takes back what of its data the broken step has used.
    """
    register("zit_downgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(fault_ranks, args, params)`: these are back; it forms the groups of all ranks.
    """
    register("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, need_rebuild, error_ranks, repair_info, args, params)`: sends to those who are back, or receives.
    """
    register("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    `func(step, args, params)`: data, schedulers and counters as at the end of the step.
    """
    register("zit_upgrade_rollback", func, ctx)


def tft_register_decrypt_handler(decryptor: Function | None) -> None:
    """
    `decryptor(cipher)` says the password of a private key. None is ignored.
    """
    if decryptor is not None:
        register("decrypt", decryptor, None)
