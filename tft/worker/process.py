"""
The identity of this process: its pid together with its start time. The kernel reuses pids, but two
processes never have the same pid and the same start time.
"""

import os
from pathlib import Path


def started_ticks() -> tuple[int, int]:
    """
    Return this process's pid, and its start time in clock ticks since boot (`/proc/PID/stat`, field
    22).
    """
    pid = os.getpid()
    stat = Path(f"/proc/{pid}/stat").read_text()
    return pid, int(stat.rpartition(")")[2].split()[19])
