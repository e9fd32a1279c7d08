"""
The limits of the operating system that tft needs: the number of open files, which tft raises, and
the number of threads, which error messages name.

Every connection, every shared memory and every watched process needs an open file. At the limit,
libzmq aborts its process without a message, and an agent starts ranks that cannot load their
libraries.
"""

import resource

from tft.errors import UsageError

LEAST = 256
"""The least limit of open files with which a process of a job starts. For a broker it is enough for
100 participants with two connections each."""
USUAL = 1024
"""The usual limit of open files of a process. tft raises a lower limit to this number. It is not
raised further by default, because `select` fails for file descriptors with higher numbers."""


def raise_open_files(part: str, *, highest: bool = False) -> None:
    """
    Raise this process's limit of open files to `USUAL` (1024), or as far as the hard limit permits.
    A limit that is already higher is not changed. With `highest`, raise the limit to the hard
    limit. Child processes inherit the limit.

    Raises `UsageError` when the hard limit is less than `LEAST` files. The error names `part`, the
    part of the job that this process is.
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
    Return an error message for a thread that could not be started. The message names the limits
    that an operator should check.
    """
    return f"{error}: check the limits of processes (ulimit -u, pids.max of the cgroup)"
