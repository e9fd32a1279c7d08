"""
The functions that a training program calls.

The names, arguments, ranges and results are those of `mindio_ttp.framework_ttp.ttp_decorator` in
the library MindIO TFT 7.3.0. Unless its docstring says otherwise, a function returns None. If a
function cannot carry out a call, it raises an `Exception` with the reason.
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
"""The seconds that a registered function of the training program may take. A warning is logged if
the function takes longer."""
TTP_MAX_WORLD_SIZE = LARGEST_WORLD
mindx_agent = processor.variables.task or None
"""The name that an orchestrator (the manager of a cluster) gave to the job in the environment
variable MINDX_TASK_ID. None without an orchestrator."""
mind_spore = processor.variables.mindspore
"""True if the environment variable MINDIO_FOR_MINDSPORE says that the program uses MindSpore."""
fault_handles: dict[str, Handle] = _patterns.handles
"""Maps a text that is searched for in the message of an error to a function. The function takes the
message, and returns the name of the error."""
fault_types: dict[str, str] = _patterns.types
"""Maps the name of an error to the name of its `ReportState`, which is the reason that is reported
to tft."""
EXPORTS = ("MindSpeed", "MindSpeed-LLM")
"""The names of training frameworks that `set_mindio_export_version` accepts."""


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
    Set the rank of this process, the number of ranks, and the allowed ways of recovery.

    With `enable_uce`, faults are repaired without new processes if possible: all ranks return to
    one step. With `enable_arf`, lost processes are replaced. With `enable_zit`, the job continues
    without the lost ranks until they have new processes. With `enable_tls`, the bus is encrypted
    with keys that are derived from the private key in `tls_info`. With `enable_local_copy`, only a
    warning is logged, because tft fetches lost state from the replicas on other ranks.

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

    If no tft agent has started this process, the process replaces itself by the command `tft run`.
    This command starts a new process for the rank, which runs the script again from its beginning.
    So call this function before the script forms process groups.
    """
    processor.start(master_ip, port, local_ip, "mindio")


def tft_destroy_processor() -> None:
    """
    Report that this rank has trained all its steps. Return when all ranks have trained all their
    steps. Raises `Refused` if after an incident this rank must train earlier steps again.
    """
    processor.destroy()


# ---------------------------------------------------------------- reports of the loop


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """
    Set which ranks hold copies of the optimizer state of `rank`, which must be this rank.

    `replica_info` is a list of dicts: the first dict is for dense parameters, the second dict for
    experts. In each dict, `rank_list` has the ranks that together hold `replica_cnt` copies of the
    state. `replica_shift` is the distance in `rank_list` between two ranks with the same part of
    the state. A wrong distance is an error only if the environment variable TTP_FRAMEWORK_TYPE
    is 1.
    """
    processor.replicas(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """
    Set the data-parallel group of this rank. This call is necessary if the groups that were given
    to `tft_set_optimizer_replica` are larger than the data-parallel group.

    tft uses the group if the job must continue with fewer ranks. If this rank then leaves the job,
    the ranks with the same index in the other data-parallel groups leave together with this rank.
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

    Before this call, all all-reduces of the step must be complete. The call may wait for a decision
    of the controller. Raises a `RuntimeError` with the text FORCE STOP when the program must leave
    its training loop. A second call for the same update has no effect. `backup_step` is checked,
    but not used.
    """
    processor.open(backup_step)


def tft_end_updating_os(step: int) -> None:
    """
    Report that the update of `step` is complete, so that the optimizer state is now the state at
    the end of `step`.
    """
    processor.close(step)


def tft_start_copy_os() -> None:
    """
    Report that the program is about to copy its state on this node.

    This call has no effect, because tft needs no copy of the state on the same node. Raises
    `Refused` if training is over.
    """
    processor.check_trains("tft_start_copy_os")


def tft_set_step_args(args: Any) -> None:
    """
    Set the object that every registered function of the program receives as its argument `args`. A
    call with None is ignored.
    """
    processor.set_args(args)


def tft_pause_train(cur_step: int) -> None:
    """
    Report the end of an iteration of the training loop.

    Raises a `RuntimeError` with the text STEP FINISH when the program must leave its training loop.
    A call with a negative `cur_step` is logged, and has no other effect.
    """
    if checks.number("tft_pause_train", "cur_step", cur_step, -LARGEST_STEP, LARGEST_STEP) < 0:
        log.warning("pause_ignored", step=cur_step)
    else:
        processor.pause()


def tft_reset_limit_step() -> None:
    """
    Do nothing. In the library MindIO, this call removes the limit on the steps that the program may
    train. tft removes such a limit itself when the program enters its training loop again.
    """


def tft_report_load_ckpt_step(step: int) -> None:
    """
    Report that the program has loaded a checkpoint of its own, which belongs to the end of `step`.

    Call this function before training begins. Also call it in the program's repair function when
    tft has asked that function to load a checkpoint.
    """
    processor.loaded(step)


# ---------------------------------------------------------------- faults


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """
    Report that the program has left its training loop. `error_type` is the value of a
    `ReportState`, which is the reason. `error_code` is the error code of the device, if there is
    one.

    With RS_UNKNOWN the call returns only when the job has ended for this rank.
    """
    handled = sys.exc_info()[1]  # the exception that the caller is handling, if any
    said = "" if handled is None else f"{type(handled).__name__}: {handled}"
    processor.report(checks.error(error_type, error_code), error_code, said)


def tft_wait_next_action() -> int:
    """
    Wait until it is decided whether this rank continues or exits. Return 0 if the rank must enter
    its training loop again, and 1 if its process must exit. The result is a value of `Action`.
    """
    return processor.wait().value


def tft_wait_repair_action() -> int:
    """
    Wait as `tft_wait_next_action` does. Return 0 if this rank must enter its training loop again,
    and 1 if its process must exit.

    The repair is carried out during the first call of either function after an incident. A second
    call returns at once.
    """
    return processor.wait().value


def tft_is_reboot_node() -> bool:
    """
    Return whether this process replaces an earlier process of the same rank.
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
    Return the step to which the last repair has set this rank. The step is numbered by the
    program's own count. Return 0 if there was no repair.
    """
    return processor.repair_step()


def tft_get_repair_type() -> str:
    """
    Return the name of the repair that is being carried out: `retry`, `recover` or `dump`. Return
    `unknow` (the library MindIO spells the word so) if there is no repair, or if the repair is not
    chosen yet.
    """
    return processor.repair_type


def set_mindio_export_version(framework_type: str) -> None:
    """
    Set the name of the training framework that calls this package: `MindSpeed` or `MindSpeed-LLM`.

    Before a program that uses one of these frameworks saves a last checkpoint, its registered
    functions `stop` and `clean` are called. Raises `Refused` for another name.
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
    Return the number of the device that was current when the process called `tft_init_processor`.
    If no device was in use then, return the number of the device that was current when training
    began. Return None if the process uses no device.
    """
    return processor.device


def set_device() -> None:
    """
    Make the device that `get_device` returns the current device of the calling thread.
    """
    device.use(processor.device)


def get_stream() -> Any:  # Any: torch_npu has no type annotations
    """
    Return a new stream of the current device. Return None if the program does not use torch_npu.
    """
    return device.new_stream()


def handle_l2_hbm_error(err_str: str) -> str:
    """
    Return the name of an error in the device memory (HBM MULTI BIT ECC). `err_str` is the text of
    the error.

    The name says whether the lost memory can be restored from the copies on other ranks. The name
    is `OTHER` if `tft_init_processor` was called without `enable_uce`, or was not called.
    """
    try:
        repairs = processor.told.uce
    except Refused:
        repairs = False
    return _patterns.hbm(err_str) if repairs else OTHER


def check_pytorch_version() -> bool:
    """
    Return whether the function `reinit_process_group` of torch_npu can form process groups again in
    a running process.

    Of the releases of torch_npu 2.1.0, those before post11 cannot do this. The result is True if
    the program uses another version of torch_npu, no torch_npu, or MindSpore.
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
    Return whether `ip` is the address 127.0.0.1. The last three numbers may have leading zeros.
    """
    network, *host = ip.split(".")
    return (
        len(ip) <= 15 and network == "127" and [part.lstrip("0") for part in host] == ["", "", "1"]
    )


def get_local_ip(master_ip: str, local_ip: str) -> str:
    """
    Return `local_ip`. If `local_ip` is empty, return the local address from which this machine
    reaches `master_ip`.

    The result is then empty if `master_ip` is 127.0.0.1 or unspecified (0.0.0.0), is not an IPv4
    address, or is not reachable.
    """
    alone = is_loopback_address(master_ip) or is_zero_ip(master_ip)
    if local_ip or alone or not is_valid_ip(master_ip):
        return local_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # for UDP, `connect` only chooses a local address and sends nothing
            probe.connect((master_ip, 9))
        except OSError:
            return local_ip
        return str(probe.getsockname()[0])


# ---------------------------------------------------------------- groups of torch.distributed


def _process_group_name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """
    Return the name of the next process group of torch.distributed that `ranks` form.

    The name contains the name of the present repair, so that surviving processes and new processes
    use the same name for a group.
    """
    return processor.group_names.name(ranks, use_hashed_name)


def launch_tcp_store_client(url: str, save_rank: int = -1, world_size: int = -1) -> int:
    """
    Connect the default process group to the rendezvous store at `url`, which has the form
    `tcp://HOST:PORT`. Groups that are formed from now on use this store.

    Return 0, or 1 if no store answers at that address. This call is not necessary after tft's own
    store was started again, because tft then connects the groups itself. `save_rank` and
    `world_size` are ignored.
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
    Do nothing and return 0. In tft no rank has to serve the rendezvous store, because a separate
    process serves it.
    """
    return RET_OK


# ---------------------------------------------------------------- functions of the program

Function = Callable[..., Any]
"""A function of the training program that tft calls. Any: the arguments and the result may have any
type."""


def tft_register_save_ckpt_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(step, save_info, args, ctx)`, which saves a last checkpoint.

    `save_info` says of which kinds of state (dense parameters, experts) this rank has to save a
    part, and which ranks save the parts of each kind.
    """
    register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(step, args)`, or `func(step, ctx)` in a program for MindSpore.

    The function gives the last checkpoint its final name. tft calls the function when all parts of
    the checkpoint are saved.
    """
    register("rename", func, ctx)


def tft_register_exit_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(ctx)`, which ends the process. The function is called only in
    programs for MindSpore, when the job has ended for this rank.
    """
    register("exit", func, ctx)


def tft_register_stop_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the stop function `func(args, ctx)`.

    The function makes the training thread leave its training loop with an error, even if that
    thread waits for other ranks or for the device.
    """
    register("stop", func, ctx)


def tft_register_clean_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(is_uce_error, args, ctx)`, which cleans the device after a fault.

    `is_uce_error` is True if this rank has reported a memory error. The function must return 0 (the
    device is clean), 1 (cleaning has failed) or 2 (the device is clean, and no content of its
    memory is lost).
    """
    register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(fault_ranks, args, ctx)`, which forms the process groups again after
    a fault. `fault_ranks` are the ranks that have a new process.
    """
    register("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the repair function `func(step, need_rebuild, error_ranks, repair_info, args, ctx)`.

    The function sends state to ranks that need state, receives state from other ranks, or loads the
    newest checkpoint of the program. `repair_info` says which of these it must do.
    """
    register("repair", func, ctx)


def tft_register_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the rollback function `func(step, args, ctx)`.

    The function sets the data position, schedulers and counters of the program to the end of
    `step`.
    """
    register("rollback", func, ctx)


def tft_register_stream_sync_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func()`, which waits until the device has completed its operations.

    The function `func` is not called by this version, because programs report the end of an update
    only when the device has completed the update.
    """
    register("stream_sync", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(new_dp_ranks, new_world_ranks, args, params)`.

    tft calls the function when the ranks in `new_world_ranks` continue without the other ranks. The
    function forms the process groups of these ranks. The function also sets the data position back
    to the beginning of the interrupted step.
    """
    register("zit_downgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(fault_ranks, args, params)`.

    tft calls the function when the ranks in `fault_ranks` have come back. The function forms the
    process groups of all ranks.
    """
    register("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the function `func(step, need_rebuild, error_ranks, repair_info, args, params)`, which
    is the repair function for the time when ranks come back to the job.

    The function sends state to the ranks that have come back. On a rank that has come back, the
    function receives state.
    """
    register("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Function, ctx: Any = None) -> None:
    """
    Register the rollback function `func(step, args, params)` for the time when ranks come back to
    the job.

    The function sets the data position, schedulers and counters of the program to the end of
    `step`.
    """
    register("zit_upgrade_rollback", func, ctx)


def tft_register_decrypt_handler(decryptor: Function | None) -> None:
    """
    Register the function `decryptor(cipher)`, which decrypts the password of the private key in the
    argument `tls_info`. A call with None is ignored.
    """
    if decryptor is not None:
        register("decrypt", decryptor, None)
