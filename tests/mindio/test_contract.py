"""
Tests of every function of MindIO TFT's interface: ranges, results and kinds of errors.

A row corresponds to one line of MindIO's documentation. `test_reference.py` checks names and
parameters; `test_misuse.py` checks calls that need a job.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from mindio_ttp import (
    checks,
    environment,
    framework_ttp,
    handler,
    handlers,
    processor,
    replicas,
    utils,
)
from mindio_ttp.controller_ttp import ttp_controller
from mindio_ttp.framework_ttp import ttp_decorator
from mindio_ttp.utils import uce_utils

from tests.mindio.reference import registrars

LARGEST = 2**63 - 2
"""The last step below INT64_MAX."""

REGISTRARS = registrars()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    """
    Return the state of a process that has called no MindIO function.
    """
    monkeypatch.delenv("MINDIO_FOR_MINDSPORE", raising=False)
    return _replaced(monkeypatch)


@pytest.fixture
def mindspore(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    """
    Return the state of a process that trains with MindSpore and has called no MindIO function.
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
    A call and its expected result: an error that contains `says`, or with `says` None, `returns`.
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
    Return a row whose call raises an error that contains `says`.
    """
    return Row(function, arguments, named, says=says)


def accepted(function: str, *arguments: Any, returns: Any = None, **named: Any) -> Row:
    """
    Return a row whose call succeeds with the result `returns`.
    """
    return Row(function, arguments, named, returns=returns)


def no_function(function: str, *arguments: Any) -> Row:
    """
    Return a row whose call raises `TypeError`, because an argument is not callable.
    """
    return Row(function, arguments, says="takes a function", kind=TypeError)


OPEN = {"enable_tls": False}
JOIN_FIRST = "call tft_start_processor first"

ROWS = [
    # rank must be from 0 to world_size - 1, and world_size from 1 to 100,000
    accepted("tft_init_processor", 0, 1, False, **OPEN),
    accepted("tft_init_processor", 99_999, 100_000, False, False),
    accepted("tft_init_processor", 0, 2, False, False, "", True, True, False),
    accepted("tft_init_processor", rank=0, world_size=1, enable_local_copy=False, **OPEN),
    refused("tft_init_processor", 0, 100_001, False, says="world_size must be", **OPEN),
    refused("tft_init_processor", 0, 0, False, says="world_size must be", **OPEN),
    refused("tft_init_processor", -1, 2, False, says="rank must be", **OPEN),
    refused("tft_init_processor", 2, 2, False, says="rank must be", **OPEN),
    refused("tft_init_processor", "0", 2, False, says="rank must be", **OPEN),
    refused("tft_init_processor", True, 2, False, says="rank must be", **OPEN),
    refused("tft_init_processor", 0, 2.0, False, says="world_size must be", **OPEN),
    refused("tft_init_processor", 0, 2, 0, says="enable_local_copy", **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_uce", enable_uce=1, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_arf", enable_arf="on", **OPEN),
    accepted("tft_init_processor", 0, 2, False, enable_zit=True, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_zit", enable_zit=1, **OPEN),
    refused("tft_init_processor", 0, 2, False, says="enable_tls", enable_tls=None),
    # TLS is on by default, and needs the names of its files
    refused("tft_init_processor", 0, 2, False, says="tlsCert"),
    refused("tft_init_processor", 0, 2, False, True, "x" * 10_241, says="10240"),
    # tft_init_processor must be called before tft_start_processor
    refused("tft_start_processor", "127.0.0.1", 8000, says="call tft_init_processor first"),
    # functions that need a job are refused before the process has joined one
    refused("tft_set_optimizer_replica", 0, [], says=JOIN_FIRST),
    refused("tft_set_dp_group_info", 0, [0], says=JOIN_FIRST),
    refused("tft_start_updating_os", says=JOIN_FIRST),
    refused("tft_start_updating_os", -1, says=JOIN_FIRST),
    refused("tft_start_updating_os", backup_step=LARGEST, says=JOIN_FIRST),
    refused("tft_start_updating_os", -2, says="backup_step must be"),
    refused("tft_start_updating_os", LARGEST + 1, says="backup_step must be"),
    refused("tft_end_updating_os", 1, says=JOIN_FIRST),
    refused("tft_end_updating_os", LARGEST, says=JOIN_FIRST),
    refused("tft_end_updating_os", 0, says="step must be"),
    refused("tft_end_updating_os", -1, says="step must be"),
    refused("tft_end_updating_os", LARGEST + 1, says="step must be"),
    refused("tft_end_updating_os", "1", says="step must be"),
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
    # as in MindIO, these functions work before the process has joined a job
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
    refused("tft_pause_train", None, says="cur_step must be"),
    accepted("tft_report_load_ckpt_step", 1),
    accepted("tft_report_load_ckpt_step", LARGEST),
    refused("tft_report_load_ckpt_step", 0, says="step must be"),
    refused("tft_report_load_ckpt_step", LARGEST + 1, says="step must be"),
    # the times of optimizer updates
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
    # registration of functions of the program
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
def test_a_call_returns_or_raises_as_documented_by_mindio(
    row: Row, fresh: processor.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a function is called in a process that has joined no job, then it returns MindIO's
    result, or raises an `Exception` that says what was expected."""
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")  # restored after the test
    monkeypatch.setattr(uce_utils, "TRAIN_STEP_TIME", {})
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
def test_a_mindspore_program_is_refused_optimizer_copies_and_fewer_ranks(
    name: str, mindspore: processor.Processor
) -> None:
    """When a program for MindSpore asks for optimizer copies or for training with fewer ranks, then
    it is refused."""
    told: dict[str, Any] = {"enable_local_copy": False, "enable_tls": False, name: True}
    with pytest.raises(checks.Refused, match=f"{name} must be False with MindSpore"):
        framework_ttp.tft_init_processor(0, 2, **told)


def test_a_refused_first_call_can_be_repeated(fresh: processor.Processor) -> None:
    """When a first call is refused, then a second call with the right arguments is accepted, and a
    third call is refused as too late."""
    with pytest.raises(checks.Refused, match="rank must be"):
        framework_ttp.tft_init_processor(7, 2, False, enable_tls=False)
    framework_ttp.tft_init_processor(1, 2, False, enable_tls=False)
    with pytest.raises(checks.Refused, match="already called in this process"):
        framework_ttp.tft_init_processor(1, 2, False, enable_tls=False)
    assert (fresh.told.rank, fresh.told.world) == (1, 2)


PLACES = [
    (("127.0.0.1", 1023), "port must be a number from 1024"),
    (("127.0.0.1", 65535), "to 65534"),
    (("127.0.0.1", "8000"), "port must be"),
    (("0.0.0.0", 8000), "which other machines cannot reach"),
    (("::", 8000), "which other machines cannot reach"),
    (("", 8000), "an address or a host name"),
    ((None, 8000), "an address or a host name"),
    (("1:2", 8000), "is not an address"),
    (("no-such-host.invalid", 8000), "cannot be resolved on this machine"),
    (("127.0.0.1", 8000, "0.0.0.0"), "local_ip is 0.0.0.0"),
]
"""Addresses that the controller cannot have, each with the error. A bus needs two ports, so the
last port number is refused too."""


@pytest.mark.parametrize(("place", "says"), PLACES)
def test_an_invalid_controller_address_is_refused(
    place: tuple[Any, ...], says: str, fresh: processor.Processor
) -> None:
    """When an address or a port cannot be the controller's, then the error says so at once; MindIO
    ends the process after 10 s."""
    framework_ttp.tft_init_processor(0, 1, False, enable_tls=False)
    with pytest.raises(checks.Refused, match=says):
        framework_ttp.tft_start_processor(*place)


def test_set_times_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a call gives no times, then those of the last update are used."""
    monkeypatch.setattr(uce_utils, "TRAIN_STEP_TIME", {})
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
def test_registered_functions_get_mindios_arguments(
    name: str, mindspore: bool, told: tuple[Any, ...], got: tuple[Any, ...]
) -> None:
    """When a function of the program is called, then its context is the last argument where MindIO
    passes one."""
    calls: list[tuple[Any, ...]] = []
    known = handlers.Handlers(mindspore=mindspore)
    known.register(name, lambda *never: calls.append(("the first",)), "ctx")
    known.register(name, lambda *arguments: calls.append(arguments), "ctx")
    known.call(name, *told)
    assert calls == [got]


def test_a_program_that_mindio_knows_stops_and_cleans_before_a_save(
    fresh: processor.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a program is one that MindIO knows by name, then TTP_STOP_CLEAN_BEFORE_DUMP is 1 from
    then on, and step arguments of the program are ignored."""
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
        (3, 4, [[1, 3]], (2, 3)),  # ranks 2 and 3 are tensor-parallel peers
        (5, 8, [[5, 7]], (0, 1, 4, 5)),  # two tensor-parallel peers in each of two stages
        (2, 4, [[0, 1, 2, 3], [0, 2]], (2, 3)),  # the experts are spread over two ranks
        (1, 4, [[1], [0, 1, 2, 3]], (0, 1, 2, 3)),  # each rank is the only holder of its experts
        (0, 6, [[0, 1, 3]], None),
        (2, 6, [[2, 4]], None),
        (2, 4, [[1, 2]], None),
    ],
)
def test_ranks_at_one_place_of_equal_groups_leave_together(
    rank: int, world: int, partitions: list[list[int]], together: tuple[int, ...] | None
) -> None:
    """When all groups have the same layout, then ranks at the same place in their groups leave
    together. When the layouts differ, no further rank can be determined."""
    assert replicas.column(rank, world, partitions) == together
