"""
Classifies exceptions by their text, as the library MindIO does. The text of an exception is
searched for patterns in a fixed order, and the first pattern that is found decides.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mindio_ttp.constants import ReportState
from mindio_ttp.utils.uce_utils import get_l2_hbm_error_time

ERROR_CODE = re.compile(r"\bdevice error type\s*([0-9a-fA-F]+)\b", re.IGNORECASE)
RESUMABLE = frozenset({"ARF FINISH", "STEP FINISH"})
"""The names of the errors after which the device needs no cleaning. After such an error, a program
for the library MindIO waits only once for its next action. This package keeps the names for
programs that import them, and does not use them itself."""
OTHER = "OTHER"
"""The name of an error whose text has no known pattern."""
CUT_OFF = (
    *("FORCE STOP", "ForceStopError", "STEP FINISH"),
    *("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR"),
    *("HCCEError", "SuspectRemoteError"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
"""Texts that show that a rank was stopped, or has lost its connection to another rank. They occur
in the messages of errors of MindIO, of MindSpore and of sockets."""

Handle = Callable[[str], str]
"""The type of a function that takes the text of an error and returns the name of the error, such as
"UCE ERROR"."""

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
    """The name of the error, such as "UCE ERROR"."""
    state: ReportState
    """The reason why the rank has left its training loop, as it is reported to tft."""
    code: str
    """The error code of the device, from the text of the error. Empty if the text has no code."""
    said: str = ""
    """The type and the text of the exception, in one line for the log."""


@dataclass(slots=True)
class Patterns:
    """
    The patterns that are searched for in the text of an error. Each pattern leads to the name of
    the error and to its `ReportState` (the reason why a rank has left its training loop).

    `can_repair` is a function that takes the time of a memory error, in microseconds by the clock
    of the device. It returns whether the lost memory can still be restored from the copies on other
    ranks.
    """

    can_repair: Callable[[int], bool]
    handles: dict[str, Handle] = field(default_factory=dict)
    """Maps a pattern to a function. The function takes the text of an error with this pattern, and
    returns the name of the error. The patterns are searched for in the order of this dict."""
    types: dict[str, str] = field(default_factory=dict)
    """Maps the name of an error to the name of its `ReportState`."""
    guarded: frozenset[str] = frozenset()
    """The names of the errors of device memory and of links between devices. If devices must not be
    repaired, these errors get the name `OTHER` instead."""

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
        Add a pattern that the training program has registered. The new pattern is searched for
        after the existing patterns.

        `handle` is a function that takes the text of an error with this pattern, and returns the
        name of the error. If that name is `pattern` itself, the error has the state `state`.
        """
        self.handles[pattern] = handle
        self.types[pattern] = state.name

    def classify(self, error: RuntimeError, *, repairs: bool) -> Found:
        """
        Classify `error` by the first pattern that its text contains, and return the result.

        `repairs` is True if devices that have lost memory or links are to be repaired. Raises
        `KeyError` if the function that is registered for the pattern returns an unknown name.
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
                    f"the handler of {pattern!r} has returned {name!r}; the name of a fault type "
                    f"is expected, one of {', '.join(sorted(self.types))}"
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
        error. If the text does not say when the error happened, the result is `UNREPAIRABLE`.
        """
        time = get_l2_hbm_error_time(text)
        return REPAIRABLE if time is not None and self.can_repair(time) else UNREPAIRABLE


def _named(name: str) -> Handle:
    return lambda _: name
