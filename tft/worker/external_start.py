"""
The preparation of a rank's process that another program, not the agent, has started (see
`tft.spi.launcher`).

In other processes, `tft.worker.launch` prepares the process before it runs the script. In this
process no code of tft ran before the script, so `tft.init` makes these preparations.
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
    Prepare this process if another program has started it as the process of a rank. Otherwise do
    nothing.

    Make the process die with the program that started it. Open the page (the shared memory of the
    rank), the file for its last words (the stacks that it writes before it ends), and the pipe that
    wakes the agent, if there is one. They are opened by path, because the process could not inherit
    them. Raises `UsageError` if one of the files cannot be opened.
    """
    paths = descriptor_paths()
    if paths is None:
        return
    _tie()
    try:
        page, words = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths[:2])
        # `bell` is the pipe that wakes the agent. A descriptor that is opened by path does not have
        # the flags of the agent's descriptor, so they are set again
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        bell = os.open(paths[2], flags) if paths[2] else ""
    except OSError as error:
        raise UsageError(
            f"cannot open {error.filename}, which this rank shares with its agent "
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

    If another process, such as a shell, is between that program and this process, do nothing. In
    this case the reaper of the node kills this process when the agent ends. The reaper kills all
    processes that have the agent's mark in their environment.
    """
    parent = take_parent()
    if parent is not None and parent == os.getppid():
        die_with(parent)
