"""
A process that another program has started for an agent (`tft.starter`): nothing of ours ran in it before
`tft.init`, which first does what `tft.worker.launch` does for the others.
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
    In the process of a rank: tie its life to that of the program, open the page and the file for its
    last words, which it could not inherit, and get ready to say these. In others: nothing.
    """
    paths = descriptor_paths()
    if paths is None:
        return
    _tie()
    try:
        page, words = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
    except OSError as error:
        raise UsageError(
            f"the page of this rank should be at {error.filename}, which cannot be opened "
            f"({error.strerror}): has the agent that this process was started for ended?"
        ) from None
    set_environment(descriptor_variables(page=page, words=words))
    prepare()


def stand_aside() -> None:
    """
    In a process that is part of a job and holds no rank: never returns. In others: nothing.
    """
    if not stands_aside():
        return
    _tie()
    while True:
        signal.pause()


def _tie() -> None:
    """
    Die with the program. Where it has started this process through another one, such as a shell, that is
    left to the reaper, which ends all that bears its mark.
    """
    parent = take_parent()
    if parent is not None and parent == os.getppid():
        die_with(parent)
