"""
Who this process is, beyond its pid: pids come round again, a pid with its start time does not.
"""

import os
from pathlib import Path


def started_ticks() -> tuple[int, int]:
    """
    This process's pid, and its start in clock ticks since boot (`/proc/PID/stat`, field 22).
    """
    pid = os.getpid()
    stat = Path(f"/proc/{pid}/stat").read_text()
    return pid, int(stat.rpartition(")")[2].split()[19])
