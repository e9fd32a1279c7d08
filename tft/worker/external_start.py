"""
The start of a rank's process that another program has started for an agent (`tft.spi.launcher`).

No code of tft ran in this process before `tft.init`. So `tft.init` first does the work that
`tft.worker.launch` does in other processes.
"""

import os
import signal

from tft.config import (
    descriptor_paths,
    descriptor_variables,
    set_environment,
    stands_aside,
    take_parent,
)
from tft.errors import UsageError
from tft.parent_death import die_with
from tft.worker.launch import prepare


def take_up() -> None:
    """
    Prepare the process of a rank that another program has started. In other processes, do nothing.

    Make the process die with the program that started it. Open the page (the shared memory of the
    rank) and the file for its last words (the stacks that it writes before it ends); the process
    could not inherit these files. Raises `UsageError` if one of the files cannot be opened.
    """
    paths = descriptor_paths()
    if paths is None:
        return
    _tie()
    try:
        page, words = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths[:2])
        # the pipe that wakes the agent: opening it by its path does not copy the flags of the
        # agent's descriptor, so set non-blocking here again
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        bell = os.open(paths[2], flags) if paths[2] else ""
    except OSError as error:
        raise UsageError(
            f"cannot open the shared-memory page of this rank, {error.filename} "
            f"({error.strerror}): check that the agent that this process was started for still runs"
        ) from None
    set_environment(descriptor_variables(page=page, words=words, bell=bell))
    prepare()


def stand_aside() -> None:
    """
    Wait forever if this process is a helper of a job and holds no rank. Otherwise return at once.
    """
    if not stands_aside():
        return
    _tie()
    while True:
        signal.pause()


def _tie() -> None:
    """
    Make this process die when the program that started it dies.

    If the program has started this process through another one, such as a shell, do nothing. The
    reaper of the node then ends all processes that carry its mark.
    """
    parent = take_parent()
    if parent is not None and parent == os.getppid():
        die_with(parent)
