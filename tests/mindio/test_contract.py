"""
Every function of MindIO TFT's interface, line by line: names, arguments, ranges, what comes back, kinds of error.

A row is a line of its documentation. What needs a job is in test_misuse.py.
"""

import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from mindio_ttp import (
    checks,
    controller_ttp,
    environment,
    framework_ttp,
    handler,
    handlers,
    processor,
    replicas,
    utils,
    words,
)
from mindio_ttp.controller_ttp import ttp_controller
from mindio_ttp.framework_ttp import ttp_decorator
from mindio_ttp.utils import uce_utils

LARGEST = 2**63 - 2
"""The last step below INT64_MAX."""

SIGNATURES = {
    "tft_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
    "tft_start_controller": "(bind_ip, port, enable_tls=True, tls_info='')",
    "tft_destroy_controller": "()",
    "tft_init_processor": (
        "(rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, "
        "enable_arf=False, enable_zit=False)"
    ),
    "tft_start_processor": "(master_ip, port, local_ip='')",
    "tft_destroy_processor": "()",
    "tft_set_optimizer_replica": "(rank, replica_info)",
    "tft_set_dp_group_info": "(rank, dp_rank_list)",
    "tft_start_updating_os": "(backup_step=-1)",
    "tft_end_updating_os": "(step)",
    "tft_start_copy_os": "()",
    "tft_set_step_args": "(args)",
    "tft_pause_train": "(cur_step)",
    "tft_reset_limit_step": "()",
    "tft_report_load_ckpt_step": "(step)",
    "tft_set_update_start_time": "(start_time=None)",
    "tft_set_update_end_time": "(end_time=None)",
    "tft_can_do_uce_repair": "(hbm_error_time, start_time=None, end_time=None)",
    "tft_report_error": "(error_type, error_code='')",
    "tft_wait_next_action": "()",
    "tft_wait_repair_action": "()",
    "tft_is_reboot_node": "()",
    "tft_get_reboot_type": "()",
    "tft_get_repair_step": "()",
    "tft_get_repair_type": "()",
    "tft_exception_handler": "(func)",
    "tft_register_exception_handler": "(fault_pattern, fault_type, fault_handle)",
    "set_mindio_export_version": "(framework_type)",
    "tft_register_decrypt_handler": "(decryptor)",
    **{
        f"tft_register_{name}_handler": "(func, ctx=None)"
        for name in (
            "save_ckpt", "rename", "exit", "stop", "clean", "rebuild_group", "repair", "rollback",
            "stream_sync", "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair",
            "zit_upgrade_rollback",
        )
    },
}  # fmt: skip
ORCHESTRATORS = {
    "tft_register_mindx_callback": "(action, func)",
    "tft_notify_controller_stop_train": "(fault_ranks, stop_type='stop', timeout=None)",
    "tft_notify_controller_on_global_rank": "(fault_ranks, time=1)",
    "tft_notify_controller_prepare_action": "(action, fault_ranks=None)",
    "tft_notify_controller_change_strategy": "(strategy, params='')",
    "tft_notify_controller_dump": "()",
    "tft_query_high_availability_switch": "()",
}
"""Of `mindio_ttp.controller_ttp` alone."""
REGISTRARS = sorted(name for name in SIGNATURES if SIGNATURES[name] == "(func, ctx=None)")

MINDSPORE = [
    "tft_init_controller", "tft_start_controller", "tft_init_processor", "tft_start_processor",
    "tft_destroy_controller", "tft_destroy_processor", "tft_is_reboot_node", "tft_get_reboot_type",
    "tft_set_step_args", "tft_set_optimizer_replica", "tft_end_updating_os", "tft_pause_train",
    "tft_report_error", "tft_wait_next_action", "tft_get_repair_step", "tft_get_repair_type",
    "tft_reset_limit_step", "tft_can_do_uce_repair", "tft_register_save_ckpt_handler",
    "tft_register_rename_handler", "tft_register_exit_handler", "tft_register_stop_handler",
    "tft_register_clean_handler", "tft_register_repair_handler",
    "tft_register_rebuild_group_handler", "tft_register_stream_sync_handler", "ReportState",
    "Action", "RepairType",
]  # fmt: skip
"""What MindSpore 2.10.0's TrainFaultTolerance takes from `mindio_ttp.framework_ttp`."""


def shape(function: Any) -> str:  # Any: any function
    """
    Its arguments and their defaults, without types.
    """
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


@pytest.mark.parametrize("name", [*SIGNATURES, *ORCHESTRATORS])
def test_arguments_and_defaults_are_those_of_mindio(name: str) -> None:
    """
    When a program passes arguments by place, by name or not at all, they mean what they mean to MindIO.
    """
    module = controller_ttp if name in ORCHESTRATORS else framework_ttp
    assert shape(getattr(module, name)) == (SIGNATURES | ORCHESTRATORS)[name]


def test_all_functions_are_in_the_table() -> None:
    """
    When there is a function, there is a line for it above.
    """
    kinds = {"Action", "OptimizerType", "RepairType", "ReportState"}
    functions = {name for name in vars(framework_ttp) if name.startswith(("tft_", "set_mindio"))}
    assert functions == set(SIGNATURES)
    assert set(framework_ttp.__all__) - functions == kinds
    in_controller = {name for name in vars(controller_ttp) if name.startswith("tft_")}
    assert in_controller - set(SIGNATURES) == set(ORCHESTRATORS)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (framework_ttp, MINDSPORE),
        (utils, ["tft_set_update_start_time", "tft_set_update_end_time", "tft_can_do_uce_repair"]),
        (
            controller_ttp,
            ["tft_init_controller", "tft_start_controller", "tft_destroy_controller"],
        ),
    ],
    ids=["mindspore", "utils", "controller"],
)
def test_what_programs_import_is_there(module: ModuleType, names: list[str]) -> None:
    """
    When a known user of MindIO imports a name, it is there, and it is one thing wherever it is imported.
    """
    for name in names:
        assert getattr(module, name) is getattr(framework_ttp, name)


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (words.Action, "RETRY EXIT"),
        (words.OptimizerType, "ATTENTION MOE"),
        (
            words.ReportState,
            "RS_NORMAL RS_RETRY RS_UCE RS_UCE_CORRUPTED RS_HCCL_FAILED RS_INIT_FINISH "
            "RS_PREREPAIR_FINISH RS_STEP_FINISH RS_UNKNOWN",
        ),
        (
            words.RepairType,
            "RT_SEND RT_UCE_HIGHLEVEL RT_UCE_LOWLEVEL RT_RECV_REPAIR RT_ROLLBACK RT_LOAD_CKPT "
            "RT_LOAD_REBUILD",
        ),
    ],
)
def test_the_numbers_are_those_of_mindio(kind: Any, members: str) -> None:
    """
    When a program writes a number where MindIO has a name, it means the same.
    """
    assert {each.name: each.value for each in kind} == {
        name: value for value, name in enumerate(members.split())
    }


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    """
    A process in which nothing was called.
    """
    monkeypatch.delenv("MINDIO_FOR_MINDSPORE", raising=False)
    return _replaced(monkeypatch)


@pytest.fixture
def mindspore(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    """
    The same, of a program for MindSpore.
    """
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "true")
    return _replaced(monkeypatch)


def _replaced(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    new = processor.Processor()
    for module in (processor, ttp_decorator, ttp_controller, handler):
        monkeypatch.setattr(module, "processor", new)
    return new


@dataclass(frozen=True)
class Row:
    """
    A call: `says` is part of the error, None: it returns `returns`.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    says: str | None = None
    returns: Any = None
    kind: type[Exception] = checks.Refused

    def __str__(self) -> str:
        told = [*map(repr, self.arguments), *(f"{k}={v!r}" for k, v in self.named.items())]
        return f"{self.function}({', '.join(told)})"[:70]


def refused(function: str, *arguments: Any, says: str, **named: Any) -> Row:
    """
    It raises an `Exception` that says so.
    """
    return Row(function, arguments, named, says=says)


def accepted(function: str, *arguments: Any, returns: Any = None, **named: Any) -> Row:
    """
    It returns.
    """
    return Row(function, arguments, named, returns=returns)


def no_function(function: str, *arguments: Any) -> Row:
    """
    It raises a `TypeError`, since something cannot be called.
    """
    return Row(function, arguments, says="takes a function", kind=TypeError)


OPEN = {"enable_tls": False}
JOIN_FIRST = "tft_start_processor comes first"

ROWS = [
    # rank 0 to world_size - 1, world_size 1 to 100,000
    accepted("tft_init_processor", 0, 1, False, **OPEN),
    accepted("tft_init_processor", 99_999, 100_000, False, False),
    accepted("tft_init_processor", 0, 2, False, False, "", True, True, False),
    accepted("tft_init_processor", rank=0, world_size=1, enable_local_copy=False, **OPEN),
    refused("tft_init_processor", 0, 100_001, False, says="world_size is to be", **OPEN),
    refused("tft_init_processor", 0, 0, False, says="world_size is to be", **OPEN),
    refused("tft_init_processor", -1, 2, False, says="rank is to be", **OPEN),
    refused("tft_init_processor", 2, 2, False, says="rank is to be", **OPEN),
    refused("tft_init_processor", "0", 2, False, says="rank is to be", **OPEN),
    refused("tft_init_processor", True, 2, False, says="rank is to be", **OPEN),
    refused("tft_init_processor", 0, 2.0, False, says="world_size is to be", **OPEN),
    refused("tft_init_processor", 0, 2, 0, says="enable_local_copy", **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_uce", enable_uce=1, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_arf", enable_arf="on", **OPEN),
    accepted("tft_init_processor", 0, 2, False, enable_zit=True, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_zit", enable_zit=1, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_tls", enable_tls=None),
    # TLS is on where nobody says otherwise, and needs to know its files
    refused("tft_init_processor", 0, 2, False, says="tlsCert"),
    refused("tft_init_processor", 0, 2, False, True, "x" * 10_241, says="10240"),
    # init comes first
    refused("tft_start_processor", "127.0.0.1", 8000, says="tft_init_processor comes first"),
    # nothing of a job before it was joined
    refused("tft_set_optimizer_replica", 0, [], says=JOIN_FIRST),
    refused("tft_set_dp_group_info", 0, [0], says=JOIN_FIRST),
    refused("tft_start_updating_os", says=JOIN_FIRST),
    refused("tft_start_updating_os", -1, says=JOIN_FIRST),
    refused("tft_start_updating_os", backup_step=LARGEST, says=JOIN_FIRST),
    refused("tft_start_updating_os", -2, says="backup_step is to be"),
    refused("tft_start_updating_os", LARGEST + 1, says="backup_step is to be"),
    refused("tft_end_updating_os", 1, says=JOIN_FIRST),
    refused("tft_end_updating_os", LARGEST, says=JOIN_FIRST),
    refused("tft_end_updating_os", 0, says="step is to be"),
    refused("tft_end_updating_os", -1, says="step is to be"),
    refused("tft_end_updating_os", LARGEST + 1, says="step is to be"),
    refused("tft_end_updating_os", "1", says="step is to be"),
    refused("tft_report_error", 0, says=JOIN_FIRST),
    refused("tft_report_error", 8, "f" * 15, says=JOIN_FIRST),
    refused("tft_report_error", -1, says="0 to 8"),
    refused("tft_report_error", 9, says="0 to 8"),
    refused("tft_report_error", "RS_UCE", says="0 to 8"),
    refused("tft_report_error", True, says="0 to 8"),
    refused("tft_report_error", 8, "f" * 16, says="15 characters"),
    refused("tft_report_error", 8, 507054, says="15 characters"),
    refused("tft_wait_next_action", says=JOIN_FIRST),
    refused("tft_wait_repair_action", says=JOIN_FIRST),
    refused("tft_is_reboot_node", says=JOIN_FIRST),
    # of these MindIO knows an answer before that
    accepted("tft_get_repair_step", returns=0),
    accepted("tft_get_repair_type", returns="unknow"),
    accepted("tft_get_reboot_type", returns="arf"),
    accepted("tft_start_copy_os"),
    accepted("tft_reset_limit_step"),
    accepted("tft_destroy_processor"),
    accepted("tft_set_step_args", {"any": "thing"}),
    accepted("tft_set_step_args", None),
    accepted("tft_pause_train", 0),
    accepted("tft_pause_train", -1),
    refused("tft_pause_train", None, says="cur_step is to be"),
    accepted("tft_report_load_ckpt_step", 1),
    accepted("tft_report_load_ckpt_step", LARGEST),
    refused("tft_report_load_ckpt_step", 0, says="step is to be"),
    refused("tft_report_load_ckpt_step", LARGEST + 1, says="step is to be"),
    # times
    accepted("tft_set_update_start_time"),
    accepted("tft_set_update_end_time", None),
    accepted("tft_set_update_start_time", 0),
    refused("tft_set_update_end_time", -1, says="microseconds"),
    refused("tft_set_update_start_time", "now", says="microseconds"),
    accepted("tft_can_do_uce_repair", 0, 10, 20, returns=False),
    accepted("tft_can_do_uce_repair", None, 10, 20, returns=False),
    accepted("tft_can_do_uce_repair", 15, 0, 20, returns=False),
    accepted("tft_can_do_uce_repair", 15, 10, 0, returns=False),
    accepted("tft_can_do_uce_repair", 10, 10, 20, returns=False),
    accepted("tft_can_do_uce_repair", 11, 10, 20, returns=True),
    accepted("tft_can_do_uce_repair", 19, 10, 20, returns=True),
    accepted("tft_can_do_uce_repair", 20, 10, 20, returns=False),
    accepted("tft_can_do_uce_repair", 21, 10, 20, returns=True),
    accepted("tft_can_do_uce_repair", 20, 20, 10, returns=False),
    accepted("tft_can_do_uce_repair", 21, start_time=20, end_time=10, returns=True),
    # functions of the program
    *(accepted(name, print) for name in REGISTRARS),
    *(accepted(name, func=print, ctx=object()) for name in REGISTRARS),
    *(no_function(name, 1) for name in REGISTRARS),
    *(no_function(name, None) for name in REGISTRARS),
    accepted("tft_register_decrypt_handler", None),
    accepted("tft_register_decrypt_handler", str.upper),
    no_function("tft_register_decrypt_handler", "secret"),
    no_function("tft_exception_handler", "train"),
    refused("tft_register_exception_handler", "", "RS_RETRY", str, says="fault_pattern"),
    refused("tft_register_exception_handler", 7, "RS_RETRY", str, says="fault_pattern"),
    refused("tft_register_exception_handler", "MINE", "RS_NONE", str, says="RS_UNKNOWN"),
    refused("tft_register_exception_handler", "MINE", None, str, says="fault_type"),
    no_function("tft_register_exception_handler", "MINE", "RS_RETRY", None),
    accepted("set_mindio_export_version", "MindSpeed"),
    accepted("set_mindio_export_version", framework_type="MindSpeed-LLM"),
    refused("set_mindio_export_version", "Megatron", says="MindSpeed, MindSpeed-LLM"),
    refused("set_mindio_export_version", None, says="MindSpeed, MindSpeed-LLM"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_call_is_followed_or_refused_as_by_mindio(
    row: Row, fresh: processor.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    When a function is called in a process that has joined no job, it returns what MindIO returns, or raises an
    `Exception` that says what was expected.
    """
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")  # put back what a row changes
    monkeypatch.setattr(uce_utils, "_last", uce_utils.UpdateTimes())
    function = getattr(framework_ttp, row.function)
    if row.says is None:
        assert function(*row.arguments, **row.named) == row.returns
        return
    with pytest.raises(row.kind, match=row.says.replace("(", r"\(")) as raised:
        function(*row.arguments, **row.named)
    assert type(raised.value) is row.kind
    assert row.function.removesuffix("_handler") in str(raised.value) or row.says in (
        JOIN_FIRST, "tlsCert", "10240",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["enable_local_copy", "enable_zit"])
def test_mindspore_makes_no_copies_and_leaves_no_ranks(
    name: str, mindspore: processor.Processor
) -> None:
    """
    When a program for MindSpore asks for either, it is refused.
    """
    told: dict[str, Any] = {"enable_local_copy": False, "enable_tls": False, name: True}
    with pytest.raises(checks.Refused, match=f"{name} is to be False with MindSpore"):
        framework_ttp.tft_init_processor(0, 2, **told)


def test_what_was_refused_has_changed_nothing(fresh: processor.Processor) -> None:
    """
    When a first call is refused, a second one with the right arguments is followed; a third one comes too
    late.
    """
    with pytest.raises(checks.Refused, match="rank is to be"):
        framework_ttp.tft_init_processor(7, 2, False, enable_tls=False)
    framework_ttp.tft_init_processor(1, 2, False, enable_tls=False)
    with pytest.raises(checks.Refused, match="called before in this process"):
        framework_ttp.tft_init_processor(1, 2, False, enable_tls=False)
    assert (fresh.told.rank, fresh.told.world) == (1, 2)


PLACES = [
    (("127.0.0.1", 1023), "port is to be a number from 1024"),
    (("127.0.0.1", 65535), "to 65534"),
    (("127.0.0.1", "8000"), "port is to be"),
    (("0.0.0.0", 8000), "no address others reach"),
    (("::", 8000), "no address others reach"),
    (("", 8000), "an address or a host's name"),
    ((None, 8000), "an address or a host's name"),
    (("1:2", 8000), "no address"),
    (("no-such-host.invalid", 8000), "not known here"),
    (("127.0.0.1", 8000, "0.0.0.0"), "local_ip is 0.0.0.0"),
]
"""Where the controller cannot be. A bus has two ports, so that the last one is left out."""


@pytest.mark.parametrize(("place", "says"), PLACES)
def test_a_place_where_no_controller_can_be_is_refused(
    place: tuple[Any, ...], says: str, fresh: processor.Processor
) -> None:
    """
    When an address or a port cannot be the controller's, this is said; MindIO ends the process after 10 s.
    """
    framework_ttp.tft_init_processor(0, 1, False, enable_tls=False)
    with pytest.raises(checks.Refused, match=says):
        framework_ttp.tft_start_processor(*place)


def test_times_that_were_set_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    When no times are given, those of the last update count.
    """
    monkeypatch.setattr(uce_utils, "_last", uce_utils.UpdateTimes())
    utils.tft_set_update_start_time(100)
    utils.tft_set_update_end_time(200)
    assert utils.tft_can_do_uce_repair(150)
    assert utils.tft_can_do_uce_repair(201)
    assert not utils.tft_can_do_uce_repair(99)
    assert not utils.tft_can_do_uce_repair(150, start_time=160)


CALLED: list[tuple[str, bool, tuple[Any, ...], tuple[Any, ...]]] = [
    ("save_ckpt", False, (3, [], "args"), (3, [], "args", "ctx")),
    ("rename", False, (3, "args"), (3, "args")),
    ("rename", True, (3,), (3, "ctx")),
    ("exit", True, (), ("ctx",)),
    ("stop", False, ("args",), ("args", "ctx")),
    ("clean", False, (True, "args"), (True, "args", "ctx")),
    ("rebuild_group", False, ([1], "args"), ([1], "args", "ctx")),
    ("repair", False, (3, True, [1], {}, "args"), (3, True, [1], {}, "args", "ctx")),
    ("rollback", False, (3, "args"), (3, "args", "ctx")),
    ("stream_sync", False, (), ()),
    ("zit_downgrade_rebuild", False, ([0], [0, 1], "args", "p"), ([0], [0, 1], "args", "p")),
    ("zit_upgrade_rebuild", False, ([1], "args", "p"), ([1], "args", "p")),
    ("zit_upgrade_repair", False, (3, False, [1], {}, "a", "p"), (3, False, [1], {}, "a", "p")),
    ("zit_upgrade_rollback", False, (3, "args", "p"), (3, "args", "p")),
]


@pytest.mark.parametrize(("name", "mindspore", "told", "got"), CALLED)
def test_functions_are_called_with_what_mindio_calls_them_with(
    name: str, mindspore: bool, told: tuple[Any, ...], got: tuple[Any, ...]
) -> None:
    """
    When a function of the program is called, its context comes last, where MindIO hands that over.
    """
    calls: list[tuple[Any, ...]] = []
    known = handlers.Handlers(mindspore=mindspore)
    known.register(name, lambda *never: calls.append(("the first",)), "ctx")
    known.register(name, lambda *arguments: calls.append(arguments), "ctx")
    known.call(name, *told)
    assert calls == [got]


def test_a_known_user_stops_and_cleans_before_it_saves(
    fresh: processor.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    When a program is one of MindIO's known users, TTP_STOP_CLEAN_BEFORE_DUMP is 1 from then on, and its step
    arguments are ignored.
    """
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")
    framework_ttp.tft_set_step_args("before")
    framework_ttp.set_mindio_export_version("MindSpeed-LLM")
    framework_ttp.tft_set_step_args("ignored")
    assert environment.variables().clean_before_dump
    assert fresh.args == "before"


@pytest.mark.parametrize(
    ("rank", "world", "partitions", "together"),
    [
        (3, 4, [[0, 1, 2, 3]], (3,)),
        (3, 4, [[1, 3]], (2, 3)),  # two tensor-parallel peers
        (5, 8, [[5, 7]], (0, 1, 4, 5)),  # two of them, and two stages
        (2, 4, [[0, 1, 2, 3], [0, 2]], (2, 3)),  # experts that are spread over two
        (1, 4, [[1], [0, 1, 2, 3]], (0, 1, 2, 3)),  # each is the only one of its kind
        (0, 6, [[0, 1, 3]], None),
        (2, 6, [[2, 4]], None),
        (2, 4, [[1, 2]], None),
    ],
)
def test_who_leaves_with_a_rank_has_its_place_in_groups_like_its_own(
    rank: int, world: int, partitions: list[list[int]], together: tuple[int, ...] | None
) -> None:
    """
    When groups are laid out alike, the ranks at one place of theirs leave together; when they are not, nobody
    knows who that is.
    """
    assert replicas.column(rank, world, partitions) == together
