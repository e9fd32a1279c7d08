"""
Classifies exceptions by their text, as MindIO does: it searches the text for patterns in a fixed
order.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mindio_ttp.constants import ReportState
from mindio_ttp.utils.uce_utils import get_l2_hbm_error_time

ERROR_CODE = re.compile(r"\bdevice error type\s*([0-9a-fA-F]+)\b", re.IGNORECASE)
RESUMABLE = frozenset({"ARF FINISH", "STEP FINISH"})
"""Names of errors after which a program for MindIO waits only once for its next action, because the
device needs no cleaning. This package itself does not use the names."""
OTHER = "OTHER"
CUT_OFF = (
    *("FORCE STOP", "ForceStopError", "STEP FINISH"),
    *("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR"),
    *("HCCEError", "SuspectRemoteError"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
"""Texts in errors of a rank that was stopped, or that has lost its connection to another rank. They
come from MindIO, MindSpore and sockets."""

Handle = Callable[[str], str]
"""A function that takes the text of an error and returns the name of the error."""

HBM = "HBM MULTI BIT ECC"
REPAIRABLE, UNREPAIRABLE = f"{HBM} can repair", f"{HBM} can't repair"


def is_cut_off(said: str) -> bool:
    """
    Return True if `said`, the text of an error, says that the rank was stopped, or that its
    connection to another rank was lost.
    """
    return any(text in said for text in CUT_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    The result of the classification of an error."""

    name: str
    state: ReportState
    code: str
    """The error code of the device. Empty if the error has no code."""
    said: str = ""
    """The type and the text of the error, on one line."""


@dataclass(slots=True)
class Patterns:
    """
    The patterns to search for in the text of an error, each with the `ReportState` of such errors.

    `can_repair` takes the time of a memory error, in microseconds by the clock of the device. It
    returns whether the lost memory can still be restored from the copies on other ranks.
    """

    can_repair: Callable[[int], bool]
    handles: dict[str, Handle] = field(default_factory=dict)
    """Maps a pattern to the function that returns the name of an error with this pattern. The
    patterns are searched for in the order of this dict."""
    types: dict[str, str] = field(default_factory=dict)
    """Maps the name of an error to the name of its `ReportState`."""
    guarded: frozenset[str] = frozenset()
    """Names of errors that are replaced by `OTHER` if devices must not be repaired."""

    def __post_init__(self) -> None:
        for text, state in (
            ("UCE ERROR", ReportState.RS_UCE),
            (HBM, ReportState.RS_UCE),
            ("FORCE STOP", ReportState.RS_NORMAL),
            ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH),
            ("STEP FINISH", ReportState.RS_STEP_FINISH),
            ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED),
            ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED),
            ("UB LINK ERROR", ReportState.RS_HCCL_FAILED),
            ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED),
        ):
            self.handles[text] = self.hbm if text == HBM else _named(text)
            self.types[text] = state.name
        self.types[REPAIRABLE] = ReportState.RS_UCE.name
        self.types[UNREPAIRABLE] = ReportState.RS_UCE_CORRUPTED.name
        self.types[OTHER] = ReportState.RS_UNKNOWN.name
        devices = {"RS_UCE", "RS_UCE_CORRUPTED", "RS_HCCL_FAILED"}
        self.guarded = frozenset(name for name, state in self.types.items() if state in devices)

    def add(self, pattern: str, state: ReportState, handle: Handle) -> None:
        """
        Add a pattern of the user. It is searched for after the existing patterns.
        """
        self.handles[pattern] = handle
        self.types[pattern] = state.name

    def classify(self, error: RuntimeError, *, repairs: bool) -> Found:
        """
        Classify `error` by the first pattern that its text contains.

        `repairs` is True if devices that have lost memory or links are to be repaired. Raises
        `KeyError` if the handler of the pattern returns an unknown name.
        """
        text = str(error)
        code = match[1][:15] if (match := ERROR_CODE.search(text)) else ""
        said = f"{type(error).__name__}: {' '.join(text.split())}"
        for pattern, handle in self.handles.items():
            if pattern not in text:
                continue
            name = handle(text)
            if name not in self.types:
                raise KeyError(
                    f"the handler of {pattern!r} has returned {name!r}; expected is one of "
                    f"{', '.join(sorted(self.types))}"
                )
            if name in self.guarded and not repairs:
                break
            state = ReportState[self.types[name]]
            return Found(name=name, state=state, code=code, said=said)
        return Found(name=OTHER, state=ReportState.RS_UNKNOWN, code=code, said=said)

    def hbm(self, text: str) -> str:
        """
        Return the name of an error in the device memory (HBM): `REPAIRABLE` if the lost memory can
        be restored from the copies on other ranks, else `UNREPAIRABLE`. `text` is the text of the
        error. If it has no time, the result is `UNREPAIRABLE`.
        """
        time = get_l2_hbm_error_time(text)
        return REPAIRABLE if time is not None and self.can_repair(time) else UNREPAIRABLE


def _named(name: str) -> Handle:
    return lambda _: name
