"""
Tests of the helper functions in `ttp_decorator` and `uce_utils` that not every program calls.
"""

import socket
import sys
from types import SimpleNamespace

import pytest
from mindio_ttp import handler, processor
from mindio_ttp.classification import REPAIRABLE, UNREPAIRABLE, Patterns
from mindio_ttp.framework_ttp import ttp_decorator
from mindio_ttp.utils import uce_utils


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> processor.Processor:
    """
    Return the state of a process that has called no MindIO function.
    """
    new = processor.Processor()
    monkeypatch.setattr(ttp_decorator, "processor", new)
    monkeypatch.setattr(uce_utils, "TRAIN_STEP_TIME", {})
    return new


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("2.1.0.post10", False),
        ("2.1.0.post11", True),
        ("2.1.0.post11.dev20250101", True),
        ("2.1.0.dev20240101", False),
        ("2.1.0", False),
        ("2.1.0.post9", False),
        ("2.6.0", True),
        ("2.6.0.post3", True),
        ("", True),
    ],
)
def test_the_version_of_torch_npu_tells_whether_groups_can_be_rebuilt(
    version: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When torch_npu is older than 2.1.0.post11, then it cannot rebuild process groups; any other
    version can."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__=version))
    assert ttp_decorator.check_pytorch_version() is can


def test_groups_can_be_rebuilt_without_torch_npu() -> None:
    """When a program has no torch_npu, then groups can be rebuilt."""
    assert "torch_npu" not in sys.modules
    assert ttp_decorator.check_pytorch_version()


@pytest.mark.parametrize(
    ("text", "is_address", "is_loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.0.0.01", False, True),
        ("127.0.0.2", True, False),
        ("127.0.1", False, False),
        ("10.0.0.255", True, False),
        ("10.0.0.256", False, False),
        ("10.0.0", False, False),
        ("10.0.0.1 ", False, False),
        ("127.000000.0.0.1", False, False),
        ("::1", False, False),
        ("a-host", False, False),
        ("", False, False),
    ],
)
def test_an_ipv4_address_is_distinguished_from_a_name(
    text: str, is_address: bool, is_loopback: bool
) -> None:
    """When a text is an IPv4 address, or the loopback address, then the helpers say so."""
    assert ttp_decorator.is_valid_ip(text) is is_address
    assert ttp_decorator.is_loopback_address(text) is is_loopback


@pytest.mark.parametrize(
    ("master", "local", "address"),
    [
        ("10.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "", ""),
        ("127.0.0.01", "", ""),
        ("0.0.0.0", "", ""),
        ("a-host", "", ""),
        ("255.255.255.255", "", ""),  # a broadcast address is not the address of one machine
        ("127.0.0.2", "", "127.0.0.1"),
    ],
)
def test_the_own_address_is_that_of_the_interface_to_the_controller(
    master: str, local: str, address: str
) -> None:
    """When no address of this machine is given, then it is that of the interface to the controller.
    The address is empty if the controller is on this machine or cannot be reached."""
    assert ttp_decorator.get_local_ip(master, local) == address


def test_the_found_own_address_can_be_bound() -> None:
    """When the helper has found an address, then a socket of this machine can be bound to it."""
    found = ttp_decorator.get_local_ip("127.0.0.9", "")
    with socket.socket() as mine:
        mine.bind((found, 0))


@pytest.mark.parametrize(
    ("uce", "text", "name"),
    [
        (None, "HBM MULTI BIT ECC, time us=15", "OTHER"),
        (False, "HBM MULTI BIT ECC, time us=15", "OTHER"),
        (True, "HBM MULTI BIT ECC, time us=15", REPAIRABLE),
        (True, "HBM MULTI BIT ECC, time us=5", UNREPAIRABLE),
        (True, "HBM MULTI BIT ECC", UNREPAIRABLE),
    ],
)
def test_a_device_memory_error_has_the_name_of_its_kind(
    uce: bool | None, text: str, name: str, told: processor.Processor
) -> None:
    """When a device has a memory error, then the name of the error tells whether other ranks can
    send the lost state. Without device repair, the kind of the error is unknown."""
    if uce is not None:
        ttp_decorator.tft_init_processor(0, 1, False, enable_tls=False, enable_uce=uce)
    uce_utils.tft_set_update_start_time(10)
    uce_utils.tft_set_update_end_time(20)
    assert ttp_decorator.handle_l2_hbm_error(text) == name


def test_set_times_are_returned(told: processor.Processor) -> None:
    """When the times of an update are known, then they are returned as they were set, and a missing
    one as None."""
    assert uce_utils.get_update_start_end_time() == (None, None)
    uce_utils.tft_set_update_start_time(10)
    assert uce_utils.get_update_start_end_time() == (10, None)
    uce_utils.tft_set_update_end_time(0)
    assert uce_utils.get_update_start_end_time() == (10, 0)
    assert uce_utils.TRAIN_STEP_TIME == {"START_TIME": 10, "END_TIME": 0}


def test_a_state_added_to_fault_types_is_used() -> None:
    """When a program adds an error's name to `fault_types`, then its function for the text may
    return that name. The function may also return OTHER for an unknown error."""
    mine = Patterns(can_repair=bool)
    mine.types["MINE"] = "RS_RETRY"
    mine.handles["mine"] = lambda text: "MINE" if "7" in text else "OTHER"
    assert mine.classify(RuntimeError("mine: 7"), repairs=True).state.name == "RS_RETRY"
    assert mine.classify(RuntimeError("mine: 8"), repairs=True).state.name == "RS_UNKNOWN"
    assert ttp_decorator.fault_types is handler.patterns.types
