"""
The priority of a warm process.
"""

import subprocess
import sys

PROGRAM = """
import os
from tft.worker.priority import LowPriority
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
before = os.getpriority(os.PRIO_PROCESS, 0)
low = LowPriority()
low.restore()
print(before, os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_an_ordinary_user_keeps_the_priority() -> None:
    """When a process may not raise its priority, or may, then it has its own priority again after it
    has waited with a low one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    before, after = done.stdout.split()
    assert before == after
