"""
What the kernel says of another process's main thread.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MainThread:
    """
    A thread at one moment.
    """

    state: str
    """`R` runs or wants to, `S` sleeps, `T` is stopped, `Z` is dead and not yet waited for."""
    switches: int
    """How often it has left a processor: while this stays the same, it has not run."""


def main_thread(pid: int) -> MainThread | None:
    """
    The main thread of a process; None when there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return MainThread(
        state=fields["State"].split()[0],
        switches=int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"]),
    )
