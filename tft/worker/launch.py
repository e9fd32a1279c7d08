"""
The start of a rank's process.

There are two ways in which the process starts. Either the agent runs one of these commands:

    python -m tft.worker.launch SCRIPT ARGS...
    python -m tft.worker.launch -m MODULE ARGS...
    python -m tft.worker.launch --warm FD ADAPTOR SCRIPT ARGS...    (for a warm process)

Or the fork server (`tft.worker.fork_server`), which has done the imports already, forks the process
and calls `launch` in it.

Before the script starts, the process arranges to die with the agent and prepares to write its last
words (the stacks of its threads). It then imports the modules that the framework will need. After
that it runs the script as an ordinary Python does, even if the script never calls `tft.init`.
"""

import atexit
import faulthandler
import functools
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from tft.config import LaunchSettings, launch_settings
from tft.errors import UsageError
from tft.forked_task import WARM
from tft.page import Page
from tft.parent_death import LAST_WORDS, die_with_parent, name_process


def main() -> None:
    """
    Run the script that the command line names: `[--warm FD ADAPTOR] SCRIPT ARGS...`. With `--warm`
    this process is a warm process, which gets its rank later, through the socket FD.

    An exception of the script is printed, and the exit code is that of an ordinary Python. The exit
    code is 2 if the process was not started correctly by an agent.
    """
    if sys.argv[1] == WARM:
        from tft.plugins import preload_plugins

        descriptor, adaptor, *arguments = sys.argv[2:]
        try:
            preload(adaptor)
            preload_plugins()
        except UsageError as refused:
            sys.exit(f"tft: {refused}")
        with socket.socket(fileno=int(descriptor)) as channel:
            launch(arguments, warm=channel)
    else:
        launch(sys.argv[1:])


def launch(arguments: Sequence[str], *, warm: socket.socket | None = None) -> None:
    """
    Run the script in this process, as the process of the rank that the environment names.

    `arguments` are the command line: the script, or `-m` and a module, followed by the arguments of
    the script. `warm` is the socket through which a warm process gets its rank, at the first use of
    the session (`tft.worker.warm`). None: the process has its rank already.
    """
    end = _ScriptEnd()
    if warm is None:
        end.begin()
    else:
        # import this module only now: other processes do not need it yet, and should start fast
        from tft.worker.warm import wait_in_session

        die_with_parent()
        name_process("tft-warm")
        wait_in_session(warm, end.begin)
    # `atexit` calls functions in reverse order, so `mark` is called after all that the script
    # registers
    atexit.register(end.mark)
    try:
        _run(arguments)
    except SystemExit as left:
        end.reached = left.code in (None, 0)
        raise
    end.reached = True


class _ScriptEnd:
    """
    Prepares this process for its rank, and notes the regular end of the script on the page of the
    rank (shared memory that the agent reads).
    """

    def __init__(self) -> None:
        self.reached = False
        """True if the script has returned or has called `sys.exit` without an error."""
        self._page: Page | None = None
        self._incarnation = 0

    def begin(self) -> None:
        """
        Prepare this process as the process of the rank that the environment names. If it was not
        started correctly by an agent, end it with exit code 2.
        """
        die_with_parent()
        try:
            settings = prepare()
            self._page = Page.open(settings.page)
        except UsageError as refused:
            sys.stderr.write(f"tft: {refused}\n")
            sys.exit(2)
        self._incarnation = settings.incarnation

    def mark(self) -> None:
        """
        If the script has ended without an error, note that on the page of the rank (shared memory
        that the agent reads).
        """
        if self._page is None or not self.reached:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # a stream may be closed
                stream.flush()
        self._page.end_script(self._incarnation)


def _run(arguments: Sequence[str]) -> None:
    """
    Run the script or module as `python` does.
    """
    if arguments[0] == "-m":
        _, module, *rest = arguments
        # `runpy` replaces the first element of `sys.argv` by the path of the module's file, as
        # `python -m` does
        sys.argv = [module, *rest]
        # search modules in the working directory first, as `python -m` does
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    sys.argv = list(arguments)
    # add the directory of the script to `sys.path`, as `python SCRIPT` does: the agent starts
    # Python with -P, which leaves it out
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def prepare() -> LaunchSettings:
    """
    Prepare this process to write its last words (the stacks of all threads, when a signal asks for
    them), and import the modules that the framework will need. Return the settings of this process.
    """
    settings = launch_settings()
    name_process(f"tft-rank-{settings.rank}")
    faulthandler.enable(file=settings.words)  # a crash in C code writes the stacks of all threads
    # The agent sends the signal `LAST_WORDS` to a rank that hangs. The handler that is registered
    # here is written in C and needs no GIL, so it can always write the stacks. Because of `chain`,
    # the default action of the signal then ends the process.
    faulthandler.register(LAST_WORDS, file=settings.words, all_threads=True, chain=True)
    preload(settings.adaptor)
    return settings


# cached: the fork server calls this function before it forks, so that the call in a forked process
# returns at once
@functools.cache
def preload(adaptor: str) -> None:
    """
    Import the adaptor called `adaptor`, and the modules that its framework will need.

    Raises `UsageError` if the adaptor cannot be loaded.
    """
    # import `tft.plugins` only now, when the process can already write its stacks: if the import
    # hangs, the stacks show where
    from tft.plugins import load_adaptor

    load_adaptor(adaptor).hook.tft_preload()


if __name__ == "__main__":
    main()
