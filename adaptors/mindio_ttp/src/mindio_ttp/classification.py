"""
What an exception's text says of the fault: MindIO looks for substrings, in this order.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mindio_ttp.utils.uce_utils import get_l2_hbm_error_time
from mindio_ttp.words import ReportState

ERROR_CODE = re.compile(r"\bdevice error type\s*([0-9a-fA-F]+)\b", re.IGNORECASE)
RESUMABLE = frozenset({"ARF FINISH", "STEP FINISH"})
"""Names with one wait only: what is to be cleaned is clean already."""
OTHER = "OTHER"
CUT_OFF = (
    *("FORCE STOP", "ForceStopError", "STEP FINISH"),
    *("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR"),
    *("HCCEError", "SuspectRemoteError"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
"""In errors of a rank that was stopped, or whose link to another one broke: MindIO's words, MindSpore's, and
those of sockets."""

Handle = Callable[[str], str]
"""From the text of an error to the name of what it is."""

HBM = "HBM MULTI BIT ECC"
REPAIRABLE, UNREPAIRABLE = f"{HBM} can repair", f"{HBM} can't repair"


def is_cut_off(said: str) -> bool:
    """
    Whether an error says that its rank was stopped, or that a link to another rank broke.
    """
    return any(text in said for text in CUT_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    What an error is.
    """

    name: str
    state: ReportState
    code: str
    """Of the device; empty: it has said none."""
    said: str = ""
    """The error itself, on one line."""


@dataclass(slots=True)
class Patterns:
    """
    What is looked for, and what it stands for. `can_repair` says whether memory that was lost at a time
    (microseconds of the device) can still be had from the copies of others.
    """

    can_repair: Callable[[int], bool]
    handles: dict[str, Handle] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    """By the name of an error: the name of the `ReportState` it stands for."""
    guarded: frozenset[str] = frozenset()
    """Names that are `OTHER` where devices are not to be repaired."""

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
        One of the user's own, looked for after those that are there.
        """
        self.handles[pattern] = handle
        self.types[pattern] = state.name

    def classify(self, error: RuntimeError, *, repairs: bool) -> Found:
        """
        The first that fits; `repairs`: devices that have lost memory or links are to be repaired.
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
                    f"the handler of {pattern!r} says {name!r}; it must say one of "
                    f"{', '.join(sorted(self.types))}"
                )
            if name in self.guarded and not repairs:
                break
            state = ReportState[self.types[name]]
            return Found(name=name, state=state, code=code, said=said)
        return Found(name=OTHER, state=ReportState.RS_UNKNOWN, code=code, said=said)

    def hbm(self, text: str) -> str:
        """
        Return whether memory that an error says is lost can be had from the copies of others.
        """
        time = get_l2_hbm_error_time(text)
        return REPAIRABLE if time is not None and self.can_repair(time) else UNREPAIRABLE


def _named(name: str) -> Handle:
    return lambda _: name
