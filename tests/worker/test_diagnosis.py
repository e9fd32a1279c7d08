"""
The fault kind of an exception, and whether the process can continue after the exception.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tft.errors import UsageError
from tft.protocol.messages import FaultKind
from tft.spi.faults import TrainingFault
from tft.spi.types import DeviceFault, Diagnosis
from tft.worker.devices import DEVICE_FAULTS
from tft.worker.diagnosis import Diagnostician

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "device_faults.md"
CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call."


def declared() -> TrainingFault:
    """
    Return an exception that declares its fault kind and its effects.
    """
    return TrainingFault("a fault", kind="numeric", polluted=True, not_after=7, context_lost=True)


DECLARED = Diagnosis(kind="numeric", polluted=True, not_after=7, context_lost=True)


SPREAD = Diagnosis(kind="numeric", polluted=True, not_after=5)


def broken(error: BaseException) -> FaultKind | Diagnosis | None:
    """
    Return the fault kind of an exception, as an adaptor that knows two kinds of exceptions.
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
        ("CUDA driver error: uncorrectable ECC error encountered", "memory", True),
        ("Triton Error [CUDA]: uncorrectable ECC error encountered", "memory", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "software", True),
        (
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
            "process",
            True,
        ),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "process", True),
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
def test_device_errors_are_recognized_by_their_text(
    said: str, kind: FaultKind, *, lost: bool
) -> None:
    """When a device fails, then the text of the exception decides the kind of the fault, and
    whether the context is lost."""
    assert diagnose(RuntimeError(said)) == Diagnosis(kind=kind, context_lost=lost)


def test_device_words_in_another_exception_type_are_a_software_fault() -> None:
    """When an exception has the text of a device fault, but a type that no framework raises for
    devices, then it is a software fault."""
    assert diagnose(ValueError("UCE ERROR")) == Diagnosis(kind="software")
    assert diagnose(KeyboardInterrupt()) == Diagnosis(kind="software")


def test_adaptor_classifies_the_exceptions_of_its_framework() -> None:
    """When neither the exception nor the table gives a kind, then the adaptor gives the kind."""
    assert diagnose(ConnectionResetError()) == Diagnosis(kind="network")


def test_adaptor_may_know_why_what_looks_like_a_bug_is_none() -> None:
    """When the table says that an error is a bug of the script, and the adaptor gives another kind,
    then that kind counts. The context is lost nevertheless."""
    asserted = RuntimeError(CUDA.format("device-side assert triggered"))
    broken_link = Diagnostician(lambda error: "network").diagnose(asserted)
    assert broken_link == Diagnosis(kind="network", context_lost=True)
    unknown = Diagnostician(lambda error: None).diagnose(asserted)
    assert unknown == Diagnosis(kind="software", context_lost=True)


def test_training_fault_declares_the_fault() -> None:
    """When a `TrainingFault` declares a kind and effects, then the diagnosis has them. When it
    declares nothing, then it is a bug of the script."""
    assert diagnose(declared()) == DECLARED
    assert diagnose(TrainingFault("nothing declared")) == Diagnosis(kind="software")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "weather"}, "must be one of process, node, memory.*, not 'weather'"),
        ({"not_after": "yesterday"}, "the number of a step, 0 or more, not 'yesterday'"),
        ({"not_after": -1}, "0 or more, not -1"),
        ({"not_after": True}, "0 or more, not True"),
    ],
)
def test_training_fault_with_a_wrong_argument_is_refused(
    wrong: dict[str, Any],  # Any: arguments of wrong types
    says: str,
) -> None:
    """When a kind does not exist, or `not_after` is no step, then the exception cannot be made."""
    with pytest.raises(ValueError, match=says):
        TrainingFault("a fault", **wrong)


def test_subclass_that_does_not_call_the_base_class_declares_nothing() -> None:
    """When a class derived from `TrainingFault` does not call the constructor of its base class,
    then it declares nothing, and the diagnosis does not fail."""

    class Bare(TrainingFault):
        def __init__(self) -> None:
            pass

    assert diagnose(Bare()) == Diagnosis(kind="software")


def test_spread_that_the_adaptor_reports_is_kept() -> None:
    """When the adaptor reports how far the fault has spread, then the diagnosis keeps this. When
    several exceptions in a chain name a last good step, then the earliest step counts."""
    assert diagnose(ArithmeticError()) == SPREAD
    wrapped = raised(TrainingFault("seen late", not_after=3), ArithmeticError(), "from")
    assert diagnose(wrapped) == Diagnosis(kind="numeric", polluted=True, not_after=3)


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    """
    Raise `outer` while `inner` is handled, and return the caught exception.

    `how` says whether `outer` is raised `from` the inner exception, `from none`, or without a
    cause.
    """
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "from":
                raise outer from error
            if how == "from none":
                raise outer from None
            raise outer  # noqa: B904 (the test needs a `raise` without `from`)
    except BaseException as error:  # noqa: BLE001 (the caller wants the exception)
        return error


@pytest.mark.parametrize("how", ["from", "while"])
@pytest.mark.parametrize(
    ("inner", "diagnosis"),
    [
        (ConnectionResetError(), Diagnosis(kind="network")),
        (declared(), DECLARED),
        (ArithmeticError(), SPREAD),
        (RuntimeError("UCE ERROR"), Diagnosis(kind="memory")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrapped_fault_is_still_diagnosed(
    inner: BaseException, diagnosis: Diagnosis, how: str
) -> None:
    """When the user's code wraps a fault in another exception, then the diagnosis is that of the
    fault. When it raises `from None`, then the diagnosis is a software fault."""
    assert diagnose(raised(ValueError("a step failed"), inner, how)) == diagnosis
    assert diagnose(raised(ValueError("a step failed"), inner, "from none")).kind == "software"


def test_outermost_known_exception_of_a_chain_decides_the_kind() -> None:
    """When a connection breaks while a memory fault is handled, then the diagnosis is a network
    fault."""
    error = raised(ConnectionResetError(), RuntimeError("UCE ERROR"), "while")
    assert diagnose(error) == Diagnosis(kind="network")


def test_lost_context_is_kept_from_any_exception_of_a_chain() -> None:
    """When a framework wraps a device error that loses the context, then the context is lost in the
    diagnosis too. When no exception gives the kind, then the kind is `process`."""
    launch = RuntimeError(CUDA.format("unspecified launch failure"))
    wrapped = raised(ConnectionResetError(), launch, "from")
    assert diagnose(wrapped) == Diagnosis(kind="network", context_lost=True)
    assert diagnose(TrainingFault("no device", context_lost=True)) == Diagnosis(
        kind="process", context_lost=True
    )


def test_declared_loss_of_the_context_is_no_bug_of_the_script() -> None:
    """When a script raises a fault from a failed assertion of a kernel and declares that the device
    context is lost, then the kind is `process`, although the assertion alone would be a bug."""
    assertion = RuntimeError(CUDA.format("device-side assert triggered"))
    declared = raised(TrainingFault("a kernel has failed", context_lost=True), assertion, "from")
    assert diagnose(assertion) == Diagnosis(kind="software", context_lost=True)
    assert diagnose(declared) == Diagnosis(kind="process", context_lost=True)


def test_diagnosis_of_circular_causes_ends() -> None:
    """When two exceptions are each other's cause, then the diagnosis ends."""
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert diagnose(one) == Diagnosis(kind="software")


def test_lines_of_plugins_take_precedence_over_the_table() -> None:
    """When a plugin adds lines, then these lines are tried before the lines of the table. They can
    add a fault or overrule a line of the table."""
    added = [
        DeviceFault(words=r"MUSA error: .*ECC", kind="memory", context_lost=True),
        DeviceFault(words=r"unspecified launch failure", kind=None),
    ]
    diagnose = Diagnostician(broken, added).diagnose
    assert diagnose(RuntimeError("MUSA error: ECC")) == Diagnosis(kind="memory", context_lost=True)
    failure = CUDA.format("unspecified launch failure")
    assert diagnose(RuntimeError(failure)) == Diagnosis(kind="software")
    assert diagnose(RuntimeError("UCE ERROR")) == Diagnosis(kind="memory")


def test_invalid_line_of_the_table_is_refused() -> None:
    """When the words of a line are not a valid regular expression, or its kind does not exist, then
    the line is refused and the error says why."""
    with pytest.raises(UsageError, match="not a valid regular expression"):
        DeviceFault(words="CUDA error: (", kind="memory")
    with pytest.raises(UsageError, match="'weather': use one of process, node"):
        DeviceFault(words="CUDA", kind="weather")  # type: ignore[arg-type]  # invalid on purpose


def test_document_lists_the_lines_of_the_table() -> None:
    """When the table of device faults changes, then its documentation page must show the same lines
    in the same order."""
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


def test_every_line_of_the_table_has_a_source() -> None:
    """When a line is in the table, then it names its source."""
    assert all(line.source for line in DEVICE_FAULTS)


def test_adaptor_is_asked_for_the_context_when_the_table_knows_the_kind() -> None:
    """When a line of the table gives the kind and the adaptor reports a lost context, then the
    diagnosis has the kind of the table and a lost context."""
    asked = Diagnostician(lambda _: Diagnosis(kind="process", context_lost=True))
    assert asked.diagnose(RuntimeError("UCE ERROR")) == Diagnosis(kind="memory", context_lost=True)
