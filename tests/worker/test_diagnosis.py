"""
What an exception stands for, and whether a process can go on after it.
"""

import re
from pathlib import Path

import pytest

from tft.errors import UsageError
from tft.protocol.messages import FaultKind
from tft.spi.types import DeviceFault, Diagnosis
from tft.worker.devices import DEVICE_FAULTS
from tft.worker.diagnosis import Diagnostician

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "device_faults.md"
CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call."


class Declared(Exception):
    """
    It says itself what it is.
    """

    tft_fault_kind = "numeric"
    tft_polluted = True
    tft_not_after = 7
    tft_context_lost = True


DECLARED = Diagnosis(kind="numeric", polluted=True, not_after=7, context_lost=True)


class Earlier(Exception):
    """
    It knows that what is wrong is older than others think.
    """

    tft_not_after = 3


class Undeclared(Exception):
    """
    Of a kind that does not exist.
    """

    tft_fault_kind = "weather"
    tft_not_after = "yesterday"


SPREAD = Diagnosis(kind="numeric", polluted=True, not_after=5)


def broken(error: BaseException) -> FaultKind | Diagnosis | None:
    """
    An adaptor that knows two exceptions, and much of one of them.
    """
    if isinstance(error, ArithmeticError):
        return SPREAD
    return "network" if isinstance(error, ConnectionError) else None


diagnose = Diagnostician(broken).diagnose


@pytest.mark.parametrize(
    ("said", "kind", "lost"),
    [
        (CUDA.format("uncorrectable ECC error encountered"), "memory", True),
        (
            CUDA.format("Invalid access of peer GPU memory over nvlink or a hardware error"),
            "memory",
            True,
        ),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\nLast error:\n"
            "Cuda failure 'uncorrectable ECC error encountered'",
            "memory",
            True,
        ),
        ("Cuda failure 220 'uncorrectable NVLink error detected during the", "network", True),
        (CUDA.format("unspecified launch failure"), "process", True),
        (CUDA.format("no CUDA-capable device is detected"), "process", True),
        (CUDA.format("system not yet initialized"), "process", True),
        (CUDA.format("device-side assert triggered"), "software", True),
        (CUDA.format("an illegal memory access was encountered"), "software", True),
        (CUDA.format("out of memory"), "software", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "software", False),
        ("NPU out of memory. Tried to allocate 2.00 GiB.", "software", False),
        ("UCE ERROR: error code is 507053", "memory", False),
        ("ACL stream synchronize failed, error code:507054", "memory", False),
        ("HBM MULTI BIT ECC ERROR, can repair, time us=1700000000000000", "memory", False),
        ("SUSPECT MEM ERROR", "network", False),
        ("SUSPECT REMOTE ERROR", "network", False),
        ("HCCS LINK ERROR", "network", False),
        ("HCCL OP RETRY FAILED", "network", False),
        ("FORCE STOP", "network", False),
        ("UCEError error occurs when execute, error_code=507053", "memory", False),
        ("HCCEError occurs when execute", "network", False),
        ("SuspectRemoteError error occurs", "network", False),
        ("ForceStopError occurs when execute", "network", False),
        (
            "An error occurred in the previous step of this model execution, please check",
            "process",
            True,
        ),
        ("mat1 and mat2 shapes cannot be multiplied (3507053x4)", "software", False),
        ("shape '[507053, 3]' is invalid for input of size 12", "software", False),
        ("can't allocate memory: you tried to allocate 507054 bytes", "software", False),
        ("stream sync failed, error_code=507057", "network", False),
        ("the model speaks of an uncorrectable ECC error", "software", False),
    ],
)
def test_the_errors_of_devices_are_known_by_their_words(
    said: str, kind: FaultKind, *, lost: bool
) -> None:
    """
    When a device fails, then its words say which kind of fault it is, and whether the process can go on.
    """
    assert diagnose(RuntimeError(said)) == Diagnosis(kind=kind, context_lost=lost)


def test_words_alone_are_no_fault() -> None:
    """
    When an exception that no framework raises for a device has the words, then it is the user's own.
    """
    assert diagnose(ValueError("UCE ERROR")) == Diagnosis(kind="software")
    assert diagnose(KeyboardInterrupt()) == Diagnosis(kind="software")


def test_the_adaptor_knows_the_exceptions_of_its_framework() -> None:
    """
    When nothing else has something to say, then the adaptor is asked.
    """
    assert diagnose(ConnectionResetError()) == Diagnosis(kind="network")


def test_an_exception_may_say_itself_what_it_is() -> None:
    """
    When an exception names a kind, then it is that; one that does not exist is none.
    """
    assert diagnose(Declared()) == DECLARED
    assert diagnose(Undeclared()) == Diagnosis(kind="software")


def test_the_adaptor_may_know_more_than_the_kind() -> None:
    """
    When the adaptor knows how far what is wrong has spread, then that is kept, and of several that know since
    when, the earliest counts.
    """
    assert diagnose(ArithmeticError()) == SPREAD
    wrapped = raised(Earlier(), ArithmeticError(), "from")
    assert diagnose(wrapped) == Diagnosis(kind="numeric", polluted=True, not_after=3)


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    """
    `outer`, raised while `inner` was handled.
    """
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "from":
                raise outer from error
            if how == "from none":
                raise outer from None
            raise outer  # noqa: B904 (the case in question)
    except BaseException as error:  # noqa: BLE001 (it is what is wanted)
        return error


@pytest.mark.parametrize("how", ["from", "while"])
@pytest.mark.parametrize(
    ("inner", "diagnosis"),
    [
        (ConnectionResetError(), Diagnosis(kind="network")),
        (Declared(), DECLARED),
        (ArithmeticError(), SPREAD),
        (RuntimeError("UCE ERROR"), Diagnosis(kind="memory")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_is_what_it_was_raised_from(
    inner: BaseException, diagnosis: Diagnosis, how: str
) -> None:
    """
    When the user's code wraps a fault, then it is still that fault, unless it says it is not.
    """
    assert diagnose(raised(ValueError("a step failed"), inner, how)) == diagnosis
    assert diagnose(raised(ValueError("a step failed"), inner, "from none")).kind == "software"


def test_the_outermost_that_is_known_counts() -> None:
    """
    When a connection breaks while a fault of memory is handled, then it is the connection.
    """
    error = raised(ConnectionResetError(), RuntimeError("UCE ERROR"), "while")
    assert diagnose(error) == Diagnosis(kind="network")


def test_a_context_is_lost_whoever_says_it() -> None:
    """
    When a framework wraps the error of a device into one of its own, then the context is lost all the same;
    and where nobody says of which kind that is, then the process is.
    """
    launch = RuntimeError(CUDA.format("unspecified launch failure"))
    wrapped = raised(ConnectionResetError(), launch, "from")
    assert diagnose(wrapped) == Diagnosis(kind="network", context_lost=True)

    class Lost(Exception):
        tft_context_lost = True

    assert diagnose(Lost()) == Diagnosis(kind="process", context_lost=True)


def test_a_circle_of_causes_ends() -> None:
    """
    When exceptions are each other's causes, then diagnosing them ends.
    """
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert diagnose(one) == Diagnosis(kind="software")


def test_lines_of_plugins_come_first() -> None:
    """
    When a plugin adds lines, then these count before the table's own: they add to it, and overrule it.
    """
    added = [
        DeviceFault(words=r"MUSA error: .*ECC", kind="memory", context_lost=True),
        DeviceFault(words=r"unspecified launch failure", kind=None),
    ]
    diagnose = Diagnostician(broken, added).diagnose
    assert diagnose(RuntimeError("MUSA error: ECC")) == Diagnosis(kind="memory", context_lost=True)
    failure = CUDA.format("unspecified launch failure")
    assert diagnose(RuntimeError(failure)) == Diagnosis(kind="software")
    assert diagnose(RuntimeError("UCE ERROR")) == Diagnosis(kind="memory")


def test_a_line_that_could_never_be_used_is_refused() -> None:
    """
    When a line's words are no regular expression or its kind is none, then it is refused, with what is
    wrong.
    """
    with pytest.raises(UsageError, match="not a valid regular expression"):
        DeviceFault(words="CUDA error: (", kind="memory")
    with pytest.raises(UsageError, match="'weather': use one of process, node"):
        DeviceFault(words="CUDA", kind="weather")  # type: ignore[arg-type]  # the case in question


def test_the_document_shows_the_table() -> None:
    """
    When the table changes, then so does its page: the same lines in the same order.
    """
    shown = re.findall(
        r"^\| `` (.*) `` \| (.*) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert shown == [
        (
            line.words.replace("|", "\\|"),
            line.kind or "your own bug",
            "lost" if line.context_lost else "kept",
            line.source,
        )
        for line in DEVICE_FAULTS
    ]


def test_every_line_says_where_it_is_from() -> None:
    """
    When a line stands in the table, then it has a source.
    """
    assert all(line.source for line in DEVICE_FAULTS)


def test_the_adaptor_is_asked_for_the_context_when_the_kind_is_known_already() -> None:
    """
    When a line of the table knows the kind and the adaptor knows that the context is lost, then it
    is lost.
    """
    asked = Diagnostician(lambda _: Diagnosis(kind="process", context_lost=True))
    assert asked.diagnose(RuntimeError("UCE ERROR")) == Diagnosis(kind="memory", context_lost=True)
