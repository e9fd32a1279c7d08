"""
The start of a rank's process.

An agent runs `python -m tft.worker.launch SCRIPT ARGS...`, or with `-m MODULE` in place of SCRIPT.
Or `tft.worker.fork_server` forks the process, and calls `launch` when the imports are done.

Before the script starts, the process arranges to die with the agent and prepares to write its last
words (the stacks of its threads). It then imports the modules that the framework will need. After
that it is an ordinary Python that runs the script, even if the script never calls `tft.init`.
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

    An exception of the script is shown, and the exit code is that of an ordinary Python. The exit
    code is 2 if the process was started wrongly.
    """
    launch(sys.argv[1:])


def launch(arguments: Sequence[str]) -> None:
    """
    Become the process of the rank that the environment names, and run the script.

    `arguments` are the script, or `-m` and a module, and then its arguments.
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
                with suppress(OSError, ValueError, AttributeError):  # the script may have closed it
                    stream.flush()
            page.end_script(settings.incarnation)

    # atexit calls functions in reverse order: registered before the script starts, `mark` is called
    # after all functions that the script registers
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
        # runpy puts the path of the module's file in the place of its name
        sys.argv = [module, *rest]
        sys.path.insert(0, os.getcwd())  # `python -m` does the same
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    sys.argv = list(arguments)
    # `python SCRIPT` does the same; the agent starts Python with -P, so the working directory is
    # not in `sys.path`
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def prepare() -> LaunchSettings:
    """
    Prepare the last words (the stacks of all threads), and import what the framework will need.
    Return the settings of this process.
    """
    settings = launch_settings()
    name_process(f"tft-rank-{settings.rank}")
    # faulthandler writes in C, on any thread that gets the signal, without the GIL, so this works
    # in any kind of hang. The signal's default action then ends the process.
    faulthandler.enable(file=settings.words)  # a crash in C code writes its stacks, too
    faulthandler.register(LAST_WORDS, file=settings.words, all_threads=True, chain=True)
    preload(settings.adaptor)
    return settings


@functools.cache  # cached: a forked process uses what the fork server has imported
def preload(adaptor: str) -> None:
    """
    Import the adaptor called `adaptor`, and the modules that its framework will need.

    Raises `UsageError` if the adaptor cannot be loaded.
    """
    # imported only now, after the signal for the last words (the stacks of all threads) is set up,
    # so that a hang in this import can be seen in them
    from tft.plugins import load_adaptor

    load_adaptor(adaptor).hook.tft_preload()


if __name__ == "__main__":
    main()
