"""
Reads the state of the main thread of another process from the kernel.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MainThread:
    """
    The state of a process's main thread at one moment.
    """

    state: str
    """The state of the thread as one letter: `R` runs or can run, `S` sleeps, `T` is stopped, `Z`
    has ended and is not reaped yet."""
    switches: int
    """The number of times that the thread has stopped running on a processor. If two readings of
    this number are equal and the thread sleeps in both, the thread has not run between them."""


def main_thread(pid: int) -> MainThread | None:
    """
    Return the state of the main thread of the process `pid`. Return None if there is no such
    process.
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
