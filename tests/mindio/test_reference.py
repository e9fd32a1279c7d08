"""
Tests that every name of MindIO TFT 7.3.0's Python packages exists in tft with the same meaning.

The exceptions are in the table "Names that differ" of docs/reference/mindio_differences.md.
"""

import ast
import builtins
import importlib
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
from mindio_ttp import controller_ttp, framework_ttp

from tests.mindio.reference import MODULES, functions, registrars, shape
from tests.mindio.test_page import section

Entry = Mapping[str, Any]
"""The entry of a name in the reference. Any: TOML."""
MISSING = "there is no such name"


def imported(name: str) -> ModuleType | None:
    """
    Return tft's module of this name, or None if tft has no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def kind(annotation: Any) -> str:  # Any: any annotation
    """
    Return a type annotation in the notation of the reference.
    """
    if annotation in (None, types.NoneType):
        return "None"
    if annotation is Any:
        return "object"
    if annotation in (typing.NoReturn, typing.Never):
        return "never"
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted(map(kind, typing.get_args(annotation)), key="None".__eq__))
    return "function" if origin is Callable else str(origin.__name__)


def function_differs(ours: Any, entry: Entry) -> str | None:  # Any: any object of tft
    """
    Describe how tft's function differs from the reference, or return None if both agree.
    """
    if not callable(ours):
        return "is no function here"
    if shape(ours) != entry["takes"]:
        return f"takes {shape(ours)} here, and {entry['takes']} there"
    returned = kind(typing.get_type_hints(ours)["return"])
    if returned != entry["returns"]:
        return f"returns {returned} here, and {entry['returns']} there"
    return None


def constant_differs(ours: Any, said: str) -> str | None:  # Any: any object of tft
    """
    Describe how tft's constant differs from the reference, or return None if both agree.

    A dict may have additional entries, because a program can add some.
    """
    if said.startswith("<"):
        return None if type(ours).__name__ == said.strip("<>") else f"is {ours!r} here, not {said}"
    theirs = ast.literal_eval(said)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        same = theirs.items() <= ours.items()
    else:
        same = (type(ours), ours) == (type(theirs), theirs)
    return None if same else f"is {ours!r} here, and {theirs!r} there"


def class_differs(ours: Any, entry: Entry) -> Iterator[tuple[str, str]]:  # Any: any object of tft
    """
    Yield the members of a class that differ from the reference, each with the difference.

    The empty name means the class itself.
    """
    if "members" in entry:
        members = {each.name: each.value for each in ours} if issubclass(ours, Enum) else {}
        if members != entry["members"]:
            yield "", f"is {members} here, and {entry['members']} there"
    for name in entry.get("properties", []):
        if not hasattr(ours, name):
            yield f".{name}", MISSING
    for name, each in entry.get("functions", {}).items():
        if name != "__init__":
            differs = (
                function_differs(getattr(ours, name), each) if hasattr(ours, name) else MISSING
            )
            if differs:
                yield f".{name}", differs


def module_differs(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    """
    Yield the names of a module that differ from the reference, each with the difference.

    The empty name means the module itself.
    """
    module = imported(name)
    if module is None:
        yield "", "there is no such module"
        return
    if "all" in entry and sorted(getattr(module, "__all__", [MISSING])) != sorted(entry["all"]):
        yield ".__all__", f"is {getattr(module, '__all__', MISSING)} here, and {entry['all']} there"
    for source, names in entry.get("exports", {}).items():
        for each in names:
            if getattr(module, each, MISSING) is not getattr(imported(source), each, None):
                yield f".{each}", f"is not that of {source}"
    for part, differs in (("constants", constant_differs), ("functions", function_differs)):
        for each, said in entry.get(part, {}).items():
            found = differs(getattr(module, each), said) if hasattr(module, each) else MISSING
            if found:
                yield f".{each}", found
    for each, said in entry.get("classes", {}).items():
        if not hasattr(module, each):
            yield f".{each}", MISSING
            continue
        for member, found in class_differs(getattr(module, each), said):
            yield f".{each}{member}", found


@dataclass(frozen=True)
class Call:
    """
    A function call that needs no job. `path` is the function's path below `mindio_ttp`.
    """

    path: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.path.rpartition('.')[2]}{self.arguments}"

    @property
    def entry(self) -> Entry:
        """
        The reference entry of the function.
        """
        entry: Entry = functions()[f"mindio_ttp.{self.path}"]
        return entry

    def made(self) -> Any:  # Any: any result
        """
        Make the call and return its result.
        """
        module, _, name = f"mindio_ttp.{self.path}".rpartition(".")
        return getattr(importlib.import_module(module), name)(*self.arguments)

    def answered_otherwise(self) -> str | None:
        """
        Make a wrong call. Describe the result if it is not an error that MindIO's function raises.
        """
        expected = tuple(getattr(builtins, name) for name in self.entry["raises"])
        try:
            self.made()
        except expected:
            return None
        except Exception as error:  # noqa: BLE001 (the result names any error)
            return f"raises {error!r}, and {self.entry['raises']} there"
        return f"returns, and raises {self.entry['raises']} there"


DECORATOR, MINDX = "framework_ttp.ttp_decorator", "controller_ttp.ttp_mindx_api"
UTILS, TIMES = "controller_ttp.ttp_utils", "utils.uce_utils"
WRONG = [
    *(Call(f"{DECORATOR}.{name}", (7,)) for name in registrars()),
    Call(f"{DECORATOR}.tft_register_decrypt_handler", (7,)),
    Call(f"{DECORATOR}.tft_exception_handler", (7,)),
    Call(f"{DECORATOR}.set_device"),  # fails, because this machine has no device
    Call(f"{DECORATOR}.set_mindio_export_version", ("Megatron",)),
    Call(f"{DECORATOR}.tft_set_optimizer_replica", (-1, [])),
    Call(f"{DECORATOR}.tft_set_dp_group_info", (-1, [0])),
    Call(f"{DECORATOR}.tft_report_error", (9,)),
    Call(f"{DECORATOR}.tft_end_updating_os", (0,)),
    Call(f"{DECORATOR}.tft_start_updating_os", (-2,)),
    Call(f"{DECORATOR}.tft_report_load_ckpt_step", (0,)),
    Call("controller_ttp.ttp_controller.tft_init_controller", (-2, 1, False)),
]
"""Wrong calls that a program can make without a job."""


def differences() -> dict[str, str]:
    """
    Return the difference of each name that differs from the reference, by path.
    """
    found = {
        f"{module}{name}": differs
        for module, entry in MODULES.items()
        for name, differs in module_differs(module, entry)
    }
    for call in WRONG:
        if differs := call.answered_otherwise():
            found[f"mindio_ttp.{call.path}"] = differs
    return found


def on_the_page() -> list[str]:
    """
    Return the paths of the names in the table of docs/reference/mindio_differences.md.
    """
    rows = re.findall(
        r"(?m)^\| (`.*?`) \| (.*?) \| .+? \| .+? \| .+? \|$", section("Names that differ")
    )
    found = []
    for modules, names in rows:
        for module, name in itertools.product(
            re.findall(r"`([\w.]+)`", modules), re.findall(r"`([\w.]+)`", names) or [""]
        ):
            path = module if module == "mindio_ttp" else f"mindio_ttp.{module}"
            found.append(f"{path}.{name}".rstrip("."))
    return found


def test_every_difference_from_mindio_is_on_the_page() -> None:
    """When a name of MindIO is missing in tft, or has other parameters, defaults, results or
    values, then the page has a row for it."""
    listed = on_the_page()
    assert {path: found for path, found in differences().items() if path not in listed} == {}


def test_every_row_of_the_page_is_a_difference() -> None:
    """When the page has a row for a name, then that name does differ, and there is one row for
    it."""
    listed = on_the_page()
    assert [path for path in listed if path not in differences()] == []
    assert sorted(set(listed)) == sorted(listed)


def test_every_row_gives_both_sides_and_a_reason() -> None:
    """When the table has a row, then the row gives MindIO's behaviour, tft's behaviour, and the
    reason."""
    rows = [row for row in section("Names that differ").splitlines() if row.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row for row in cells if len(row) != 5 or not all(row)] == []
    assert len(set(on_the_page())) >= len(rows)


def test_every_name_like_mindios_exists_in_mindio() -> None:
    """When a package has a name that looks like one of MindIO's, then MindIO has a function of that
    name."""
    known = {path.rpartition(".")[2] for path in functions()}
    ours = {*vars(framework_ttp), *vars(controller_ttp)}
    assert {name for name in ours if re.match("tft_|set_mindio", name)} - known == set()


# ---------------------------------------------------------------- results and exits of calls

FOLLOWED = [
    Call(f"{DECORATOR}.get_device"),
    Call(f"{DECORATOR}.get_mindio_export_version"),
    Call(f"{DECORATOR}.tft_get_repair_step"),
    Call(f"{DECORATOR}.tft_get_repair_type"),
    Call(f"{DECORATOR}.tft_get_reboot_type"),
    Call(f"{DECORATOR}.tft_reset_limit_step"),
    Call(f"{DECORATOR}.tft_exception_handler", (print,)),
    Call(f"{DECORATOR}.check_pytorch_version"),
    Call(f"{DECORATOR}.handle_l2_hbm_error", ("HBM MULTI BIT ECC, time us=7",)),
    Call(f"{DECORATOR}.is_valid_ip", ("10.0.0.1",)),
    Call(f"{DECORATOR}.is_loopback_address", ("10.0.0.1",)),
    Call(f"{DECORATOR}.get_local_ip", ("127.0.0.1", "")),
    Call("controller_ttp.ttp_controller.tft_destroy_controller"),
    Call("controller_ttp.ttp_controller.tft_query_high_availability_switch"),
    Call(f"{MINDX}.tft_register_mindx_callback", ("nothing", print)),
    Call(f"{MINDX}.tft_notify_controller_stop_train", ({},)),
    Call(f"{MINDX}.tft_notify_controller_stop_train", ({}, "pause", 7)),
    Call(f"{MINDX}.tft_notify_controller_on_global_rank", ({},)),
    Call(f"{MINDX}.tft_notify_controller_prepare_action", ("hot switch",)),
    Call(f"{MINDX}.tft_notify_controller_change_strategy", ("retry",)),
    Call(f"{MINDX}.tft_notify_controller_dump"),
    Call(f"{UTILS}.input_ip_transform", ("10.0.0.1",)),
    Call(f"{UTILS}.is_valid_ip", ("host",)),
    Call(f"{UTILS}.is_valid_ipv4", ("10.0.0.1",)),
    Call(f"{UTILS}.is_valid_ipv6", ("10.0.0.1",)),
    Call(f"{UTILS}.is_zero_ip", ("::",)),
    Call(f"{UTILS}.get_env_var_int_safely", ("TTP_NOT_SET", 7, 1, 9)),
    Call(f"{TIMES}.get_event_time"),
    Call(f"{TIMES}.get_l2_hbm_error_time", ("time us=7",)),
    Call(f"{TIMES}.get_l2_hbm_error_time", ("at some time",)),
    Call(f"{TIMES}.tft_can_do_uce_repair", (7, 1, 2)),
    Call(f"{TIMES}._can_do_repair", (7, None, None)),
    Call(f"{TIMES}.get_update_start_end_time"),
]


@pytest.mark.parametrize("call", FOLLOWED, ids=str)
def test_results_have_mindios_types_and_values(call: Call) -> None:
    """When a function is called, then its result has the type of MindIO's result, and is one of its
    values."""
    returned = call.made()
    kinds = call.entry["returns"].split(" | ")
    assert callable(returned) if kinds == ["function"] else kind(type(returned)) in kinds
    assert returned in call.entry.get("values", [returned])


def test_calls_that_end_a_process_with_mindio_are_documented() -> None:
    """When a function of MindIO's ends the process for a wrong call, and tft has a function of this
    name, then the page says how tft handles that call."""
    differ = differences()
    ends = {
        path.rpartition(".")[2]
        for path, entry in functions().items()
        if any("exit" in each.lower() for each in entry.get("raises", [])) and path not in differ
    }
    told = section("Different behaviour")
    assert sorted(ends) == ["tft_init_processor", "tft_start_controller", "tft_start_processor"]
    assert {name for name in ends if f"`{name}`" not in told} == set()
