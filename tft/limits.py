"""
The limits of the operating system that matter to tft: the limit of open files, which tft raises,
and the limit of threads, which error messages name.

Every connection, every shared memory and every watched process needs an open file. When a process
reaches the limit of open files, libzmq aborts the process without a message. Ranks that an agent
starts at the limit cannot load their libraries.
"""

import resource
import threading

from tft.errors import UsageError

LEAST = 256
"""The smallest limit of open files with which a process of a job starts. With this limit, a broker
can serve 100 processes with two connections each."""
USUAL = 1024
"""The usual limit of open files of a process. tft raises a lower limit to this number. By default
tft does not raise the limit further, because the function `select` of the C library fails for file
descriptors with higher numbers."""


def raise_open_files(part: str, *, highest: bool = False) -> None:
    """
    Raise this process's limit of open files to `USUAL` (1024), or as far as the hard limit permits.
    A limit that is already higher is not changed. With `highest`, raise the limit to the hard
    limit. Child processes inherit the limit.

    Raises `UsageError` when the hard limit is less than `LEAST` files. `part` says what this
    process does in the job, such as "the broker", for the error message.
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


def can_start_threads(number: int) -> bool:
    """
    Return whether the system lets this process start `number` more threads now.

    Call this before a context of ZeroMQ is made: libzmq aborts the process if it cannot start the
    two threads of a new context.
    """
    go_on = threading.Event()
    threads = [threading.Thread(target=go_on.wait, daemon=True) for _ in range(number)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        return False
    finally:
        go_on.set()
    return True


def no_thread(error: RuntimeError) -> str:
    """
    Return an error message for the exception `error`, which was raised because a thread could not
    be started. The message names the limits that an operator should check.
    """
    return f"{error}: check the limits of processes (ulimit -u, pids.max of the cgroup)"
