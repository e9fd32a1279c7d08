"""
The functions that a training process calls.

The names, arguments, ranges and results are those of MindIO TFT 7.3.0
(`mindio_ttp.framework_ttp.ttp_decorator`). Unless its docstring says otherwise, a function returns
None. If a function cannot carry out a call, it raises an `Exception` with the reason.
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
from mindio_ttp.constants import (
    EXIT_WAIT_TIME as EXIT_WAIT_TIME,
)
from mindio_ttp.constants import (
    LARGEST_STEP,
    LARGEST_WORLD,
)
from mindio_ttp.constants import (
    RET_ERROR as RET_ERROR,
)
from mindio_ttp.constants import (
    RET_EXCEPTION as RET_EXCEPTION,
)
from mindio_ttp.constants import (
    RET_K8S as RET_K8S,
)
from mindio_ttp.constants import (
    RET_OK as RET_OK,
)
from mindio_ttp.constants import (
    RET_PASS as RET_PASS,
)
from mindio_ttp.constants import (
    Action as Action,
)
from mindio_ttp.constants import (
    OptimizerType as OptimizerType,
)
from mindio_ttp.constants import (
    PauseType as PauseType,
)
from mindio_ttp.constants import (
    RepairType as RepairType,
)
from mindio_ttp.constants import (
    ReportState as ReportState,
)
from mindio_ttp.controller_ttp.ttp_utils import is_valid_ipv4, is_zero_ip
from mindio_ttp.handler import patterns as _patterns
from mindio_ttp.handler import tft_exception_handler as tft_exception_handler
from mindio_ttp.handler import tft_register_exception_handler as tft_register_exception_handler
from mindio_ttp.processor import ProcessorArguments, curve, processor, register

log = logs.get_logger()

ACTION_TIMEOUT = processor.variables.action_limit
"""The seconds that a function of the program may take. A warning is logged if it takes longer."""
TTP_MAX_WORLD_SIZE = LARGEST_WORLD
mindx_agent = processor.variables.task or None
"""The name that an orchestrator gave to the job (MINDX_TASK_ID). None without an orchestrator."""
mind_spore = processor.variables.mindspore
"""True if the environment variable MINDIO_FOR_MINDSPORE says that the program uses MindSpore."""
fault_handles: dict[str, Handle] = _patterns.handles
"""Maps a text that is searched for in an error to the function that returns the error's name."""
fault_types: dict[str, str] = _patterns.types
"""Maps the name of an error to the name of its `ReportState`."""
EXPORTS = ("MindSpeed", "MindSpeed-LLM")
"""The names that `set_mindio_export_version` accepts."""


# ---------------------------------------------------------------- start and end of the job


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
    Set the rank of this process, the size of the world, and the allowed recoveries.

    With `enable_uce`, faults are repaired without new processes if possible: all ranks return to
    one step. With `enable_arf`, lost processes are replaced. With `enable_zit`, the job continues
    without the lost ranks until they are back. With `enable_tls`, the bus is encrypted with keys
    that are derived from `tls_info`. `enable_local_copy` only logs a warning, because tft fetches
    lost state from the replicas on other ranks.

    Raises `Refused` for a value out of its range. Also raises `Refused` for `enable_local_copy` or
    `enable_zit` with MindSpore."""
    call = "tft_init_processor"
    checks.rank_and_world(call, rank, world_size)
    local_copy = checks.flag(call, "enable_local_copy", enable_local_copy)
    elastic = checks.flag(call, "enable_zit", enable_zit)
    if processor.variables.mindspore and (local_copy or elastic):
        name = "enable_local_copy" if local_copy else "enable_zit"
        raise Refused(f"{call}: {name} must be False with MindSpore")
    if local_copy:
        log.warning(
            "local_copy_not_made", why="lost state is copied from the replicas on other ranks"
        )
    processor.init(
        ProcessorArguments(
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
    Join the job whose controller has the address `master_ip` and `port`.

    If no tft agent has started this process, the process becomes a `tft run` of a node with one
    rank. That rank runs the script again from its beginning, so call this function before process
    groups are formed.
    """
    processor.start(master_ip, port, local_ip, "mindio")


def tft_destroy_processor() -> None:
    """
    Report that this rank has trained all its steps. Return when all ranks have trained all their
    steps.
    """
    processor.destroy()


# ---------------------------------------------------------------- reports of the loop


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """
    Set which ranks hold copies of the optimizer state of `rank`, which must be this rank.

    `replica_info` is a list of dicts: the first is for dense parameters, the second for experts.
    `rank_list` has the ranks that together hold `replica_cnt` copies of the state.
    `replica_shift` is the distance between two copies in this list. A wrong distance is an error
    only if TTP_FRAMEWORK_TYPE is 1.
    """
    processor.replicas(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """
    Set the data-parallel group of this rank. Necessary if the groups of
    `tft_set_optimizer_replica` are larger than this group.

    If this rank leaves the job, the ranks with the same index in other data-parallel groups leave
    together with this rank.
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
    Report that the optimizer state is about to be changed in place.

    All all-reduces of the step must be complete. The call may wait for a decision of the
    controller. Raises a `RuntimeError` with the text FORCE STOP when the program must leave its
    loop. A second call for the same update has no effect. `backup_step` is checked, but not used.
    """
    processor.open(backup_step)


def tft_end_updating_os(step: int) -> None:
    """
    Report that the update of `step` is complete: the optimizer state is that of the end of `step`.
    """
    processor.close(step)


def tft_start_copy_os() -> None:
    """
    Report that the program is about to copy its state on this node.

    The call has no effect, because tft needs no such copy. Raises `Refused` if training is over.
    """
    processor.check_trains("tft_start_copy_os")


def tft_set_step_args(args: Any) -> None:
    """
    Set the object that every registered function receives as its argument `args`. None is ignored.
    """
    processor.set_args(args)


def tft_pause_train(cur_step: int) -> None:
    """
    Report the end of an iteration of the training loop.

    Raises a `RuntimeError` with the text STEP FINISH when the program must leave its loop. A call
    with a negative `cur_step` is logged, and has no other effect.
    """
    if checks.number("tft_pause_train", "cur_step", cur_step, -LARGEST_STEP, LARGEST_STEP) < 0:
        log.warning("pause_ignored", step=cur_step)
    else:
        processor.pause()


def tft_reset_limit_step() -> None:
    """
    Do nothing. In MindIO this call removes the limit on the steps that the program may train. tft
    removes such a limit itself, when the program enters its loop again.
    """


def tft_report_load_ckpt_step(step: int) -> None:
    """
    Report the step of the periodic checkpoint that the program has loaded.

    Call this function before training begins, or in the program's repair function when tft has
    asked that function to load a checkpoint.
    """
    processor.loaded(step)


# ---------------------------------------------------------------- faults


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """
    Report that the program has left its loop. `error_type` is the value of a `ReportState`.

    With RS_UNKNOWN the call returns only when the job has ended for this rank.
    """
    handled = sys.exc_info()[1]  # the exception that the program is handling, if any
    said = "" if handled is None else f"{type(handled).__name__}: {handled}"
    processor.report(checks.error(error_type, error_code), error_code, said)


def tft_wait_next_action() -> int:
    """
    Wait until this rank must continue (0) or exit (1). The result is a value of `Action`.
    """
    return processor.wait().value


def tft_wait_repair_action() -> int:
    """
    Wait until this rank must continue (0) or exit (1), as `tft_wait_next_action` does.

    The repair is carried out during the first wait. A second wait returns at once.
    """
    return processor.wait().value


def tft_is_reboot_node() -> bool:
    """
    Return whether this process replaces an earlier process of its rank.
    """
    return processor.reboot


def tft_get_reboot_type() -> str:
    """
    Return why this process was started for its rank: `hot switch` if the earlier process of the
    rank still trained at that time. Return `arf` in all other cases.
    """
    return processor.reboot_type


def tft_get_repair_step() -> int:
    """
    Return the step to which the last repair has set this rank, by the program's count. Return 0 if
    there was no repair.
    """
    return processor.repair_step()


def tft_get_repair_type() -> str:
    """
    Return the repair that is being carried out: `retry`, `recover` or `dump`. Return `unknow`, as
    MindIO spells it, if there is none or if it is not chosen yet.
    """
    return processor.repair_type


def set_mindio_export_version(framework_type: str) -> None:
    """
    Set the name of the framework that calls MindIO: `MindSpeed` or `MindSpeed-LLM`.

    Before a program of these frameworks saves a last checkpoint, its `stop` and `clean` functions
    are called. Raises `Refused` for another name.
    """
    if framework_type not in EXPORTS:
        names = ", ".join(EXPORTS)
        raise Refused(f"set_mindio_export_version takes {names}, not {framework_type!r}")
    processor.export(framework_type)


def get_mindio_export_version() -> str | None:
    """
    Return the argument of `set_mindio_export_version`. Return None if that function was not called.
    """
    return processor.exported or None


def get_device() -> int | None:
    """
    Return the number of the device that was current when the process called `tft_init_processor`,
    or else when training began. Return None if the process uses no device.
    """
    return processor.device


def set_device() -> None:
    """
    Make the device that `get_device` returns the current device of the calling thread.
    """
    device.use(processor.device)


def get_stream() -> Any:  # Any: torch_npu ships no types
    """
    Return a new stream of the current device. Return None without torch_npu.
    """
    return device.new_stream()


def handle_l2_hbm_error(err_str: str) -> str:
    """
    Return the name of an error in the device memory (HBM MULTI BIT ECC). `err_str` is the text of
    the error.

    The name says whether the lost memory can be restored from other ranks. The name is `OTHER` if
    `tft_init_processor` was called without `enable_uce`, or was not called.
    """
    try:
        repairs = processor.told.uce
    except Refused:
        repairs = False
    return _patterns.hbm(err_str) if repairs else OTHER


def check_pytorch_version() -> bool:
    """
    Return whether process groups can be formed again in place (`reinit_process_group`).

    torch_npu 2.1.0 can do this since its release post11. The result is True without torch_npu, and
    for MindSpore.
    """
    parts = [] if mind_spore else device.version().split(".")
    if parts[:3] != ["2", "1", "0"]:
        return True
    post = re.match(r"post(\d+)", "".join(parts[3:4]))
    return post is not None and int(post[1]) >= 11


# ---------------------------------------------------------------- addresses


def is_valid_ip(ip_str: str) -> bool:
    """
    Return whether `ip_str` is an IPv4 address.
    """
    return is_valid_ipv4(ip_str)


def is_loopback_address(ip: str) -> bool:
    """
    Return whether `ip` is 127.0.0.1, which may also be written with leading zeros.
    """
    network, *host = ip.split(".")
    return (
        len(ip) <= 15 and network == "127" and [part.lstrip("0") for part in host] == ["", "", "1"]
    )


def get_local_ip(master_ip: str, local_ip: str) -> str:
    """
    Return `local_ip`. If it is empty, return the local address from which this machine reaches
    `master_ip`.

    The result is empty if `master_ip` is a loopback address, is not an address, or is not
    reachable.
    """
    alone = is_loopback_address(master_ip) or is_zero_ip(master_ip)
    if local_ip or alone or not is_valid_ip(master_ip):
        return local_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_ip, 9))  # UDP: chooses an interface, sends nothing
        except OSError:
            return local_ip
        return str(probe.getsockname()[0])


# ---------------------------------------------------------------- groups of torch.distributed


def _process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """
    Return the name of the next process group of `ranks`.

    The name contains the name of the present repair, so that surviving processes and new processes
    use the same name for a group.
    """
    return processor.group_names.name(ranks, use_hashed_name)


def launch_tcp_store_client(url: str, save_rank: int = -1, world_size: int = -1) -> int:
    """
    Connect the default process group to the store at `tcp://HOST:PORT`.

    Return 0, or 1 if no store answers at that address. This call is not necessary after tft's own
    store was started again, because tft then connects the groups itself.
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
    Do nothing and return 0. In tft no rank has to serve the store: a separate process does.
    """
    return RET_OK


# ---------------------------------------------------------------- functions of the program

Function = Callable[..., Any]
"""Any: functions and contexts of the program may have any type."""


def tft_register_save_ckpt_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(step, save_info, args, ctx)`, which saves a last checkpoint. `save_info` says
    which parts of the state this rank has to save.
    """
    register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(step, args)`, or `func(step, ctx)` in a program for MindSpore.

    The function gives the last checkpoint its final name. It is called when all parts are saved.
    """
    register("rename", func, ctx)


def tft_register_exit_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(ctx)`, which ends the process. It is called only in programs for MindSpore, when
    the job has ended for this rank.
    """
    register("exit", func, ctx)


def tft_register_stop_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the stop function `func(args, ctx)`.

    It makes the training thread leave its loop with an error, even if that thread waits for other
    ranks or for the device.
    """
    register("stop", func, ctx)


def tft_register_clean_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(is_uce_error, args, ctx)`, which cleans the device after a fault.

    `is_uce_error` is True if this rank has reported a memory error. The function must return 0 (the
    device is clean), 1 (cleaning has failed) or 2 (the device is clean, and no content of its
    memory is lost).
    """
    register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(fault_ranks, args, ctx)`, which forms the process groups again.
    """
    register("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(step, need_rebuild, error_ranks, repair_info, args, ctx)`.

    The function sends state to ranks that need it, or receives state from other ranks.
    """
    register("repair", func, ctx)


def tft_register_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the rollback function `func(step, args, ctx)`.

    It sets the data position, schedulers and counters of the program to the end of `step`.
    """
    register("rollback", func, ctx)


def tft_register_stream_sync_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func()`, which waits for the device.

    The function is not called by this version, because programs report the end of an update only
    when the device has completed the update.
    """
    register("stream_sync", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(new_dp_ranks, new_world_ranks, args, params)`.

    tft calls the function when the ranks in `new_world_ranks` continue without the other ranks. The
    function forms their process groups, and restores the data position to the beginning of the
    interrupted step.
    """
    register("zit_downgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    Register `func(fault_ranks, args, params)`.

    tft calls the function when the ranks in `fault_ranks` have come back. The function forms the
    process groups of all ranks.
    """
    register("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the repair function `func(step, need_rebuild, error_ranks, repair_info, args, params)`
    for ranks that come back.

    It sends state to the ranks that have come back. On a rank that has come back, it receives
    state.
    """
    register("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the rollback function `func(step, args, params)` for the time when ranks come back.

    It sets the data position, schedulers and counters of the program to the end of `step`.
    """
    register("zit_upgrade_rollback", func, ctx)


def tft_register_decrypt_handler(decryptor: Function | None) -> None:
    """
    Register `decryptor(cipher)`, which decrypts the password of the private key in `tls_info`. None
    is ignored.
    """
    if decryptor is not None:
        register("decrypt", decryptor, None)
