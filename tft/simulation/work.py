"""
The result of an order that a simulated training thread has carried out.
"""

from dataclasses import dataclass, field

from tft.protocol.messages import SavedFile, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """
    The result of an order: saved files, the verdict of a check, rank-local state, or digests. Most
    orders fill only some fields.
    """

    files: tuple[SavedFile, ...] = ()
    verdict: Verdict = "pass"
    finding: str = ""
    local_state: dict[int, str] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    line: str = ""


NOTHING = Work()
