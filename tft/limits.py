"""
Limits of the operating system: raises the number of files that a process of tft may open, and makes
the error message for a process that cannot start another thread.

Every connection, every shared memory and every process that is watched needs an open file. If no
more files may be opened, libzmq aborts its process without a message, and an agent starts ranks that
cannot load their libraries.
"""

import resource

from tft.errors import UsageError

LEAST = 256
"""The lowest limit of open files with which a process of a job starts. It allows a broker to serve
100 participants with two connections each."""
USUAL = 1024
"""The usual limit of open files of a process, to which a lower limit is raised. Only the broker
gets a higher one, because `select` fails for file descriptors above this number."""


def raise_open_files(part: str, *, highest: bool = False) -> None:
    """
    Raise this process's limit of open files to the usual one, or as far as the hard limit permits.
    A limit that is higher already stays. With `highest`, raise the limit to the hard limit. Child
    processes inherit the limit.

    Raises `UsageError`, which names the `part` of the job, when the hard limit is less than `LEAST`
    files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        raise UsageError(
            f"{part} may open only {hard} files and needs {LEAST} or more: raise the hard limit "
            "(ulimit -Hn)"
        )
    if highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    elif soft != resource.RLIM_INFINITY and soft < USUAL:
        most = USUAL if hard == resource.RLIM_INFINITY else min(USUAL, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def no_thread(error: RuntimeError) -> str:
    """
    Return a sentence about a thread that could not be started, with the limits to check.
    """
    return f"{error}: check the limits of processes (ulimit -u, pids.max of the cgroup)"
