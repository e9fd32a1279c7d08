"""
Freezes the process whose pid is given, as a debugger does: SIGCONT does not make it go on. Writes
`frozen`, or why the process cannot be frozen, and stays until the process has ended.
"""

import ctypes
import os
import sys

SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000
"""The option of `waitpid` for threads that this process traces."""

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

for thread in map(int, os.listdir(f"/proc/{sys.argv[1]}/task")):
    if libc.ptrace(SEIZE, thread, None, None) or libc.ptrace(INTERRUPT, thread, None, None):
        sys.stdout.write(f"ptrace: {os.strerror(ctypes.get_errno())}\n")
        sys.exit(1)
sys.stdout.write("frozen\n")
sys.stdout.flush()
try:
    while True:
        os.waitpid(-1, WALL)
except ChildProcessError:
    pass
