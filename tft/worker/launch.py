"""
The start of a rank's process.

The agent runs `python -m tft.worker.launch SCRIPT ARGS...`, with `-m MODULE` in place of SCRIPT for
a module. Or the fork server (`tft.worker.fork_server`), which has done the imports already, forks
the process and calls `launch` in it.

Before the script starts, the process arranges to die with the agent and prepares to write its last
words (the stacks of its threads). It then imports the modules that the framework will need. After
that it runs the script as an ordinary Python does, even if the script never calls `tft.init`.
"""

import atexit
import faulthandler
import functools
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress

from tft.config import LaunchSettings, launch_settings
from tft.errors import UsageError
from tft.page import Page
from tft.parent_death import LAST_WORDS, die_with_parent, name_process


def main() -> None:
    """
    Run the script that the command line names.

    An exception of the script is printed, and the exit code is that of an ordinary Python. The exit
    code is 2 if the process was not started correctly by an agent.
    """
    launch(sys.argv[1:])


def launch(arguments: Sequence[str]) -> None:
    """
    Prepare this process as the process of the rank that the environment names, and run the script.

    `arguments` are the command line: the script, or `-m` and a module, followed by the arguments of
    the script.
    """
    die_with_parent()
    try:
        settings = prepare()
        page = Page.open(settings.page)
    except UsageError as refused:
        sys.stderr.write(f"tft: {refused}\n")
        sys.exit(2)
    ended = False

    def mark() -> None:
        if ended:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # a stream may be closed
                    stream.flush()
            page.end_script(settings.incarnation)

    # `atexit` calls functions in reverse order, so `mark` is called after all that the script
    # registers
    atexit.register(mark)
    try:
        _run(arguments)
    except SystemExit as left:
        ended = left.code in (None, 0)
        raise
    ended = True


def _run(arguments: Sequence[str]) -> None:
    """
    Run the script or module as `python` does.
    """
    if arguments[0] == "-m":
        _, module, *rest = arguments
        # `runpy` replaces the first element by the path of the module's file, as `python -m` does
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
    # The agent sends the signal `LAST_WORDS` to a rank that hangs. This handler of the signal is
    # written in C and needs no GIL, so it can always write the stacks. Then the default action of
    # the signal ends the process (`chain`).
    faulthandler.register(LAST_WORDS, file=settings.words, all_threads=True, chain=True)
    preload(settings.adaptor)
    return settings


@functools.cache  # cached: the fork server calls this function before it forks
def preload(adaptor: str) -> None:
    """
    Import the adaptor called `adaptor`, and the modules that its framework will need.

    Raises `UsageError` if the adaptor cannot be loaded.
    """
    # import this module only now: if the import hangs, the stacks that the process writes can show
    # where
    from tft.plugins import load_adaptor

    load_adaptor(adaptor).hook.tft_preload()


if __name__ == "__main__":
    main()
