"""
How the process of a rank begins: `python -m tft.worker.launch SCRIPT ARGS...`, or with `-m MODULE` in
the place of SCRIPT, run by an agent; or in a process that `tft.worker.fork_server` has forked, which comes
here with the imports done.

Before the script starts, the process ties its life to the agent's, gets ready to say its last
words, and imports what the framework will need. Then it is an ordinary Python that runs the
script, whether or not that ever calls `tft.init`.
"""

import faulthandler
import functools
import os
import runpy
import sys
from collections.abc import Sequence

from tft.config import launch_settings
from tft.errors import UsageError
from tft.parent_death import LAST_WORDS, die_with_parent, name_process


def main() -> None:
    """
    Run the script named on the command line. What it raises is shown, and the status is the one
    that Python itself would end with; 2 where the process was started wrongly.
    """
    launch(sys.argv[1:])


def launch(arguments: Sequence[str]) -> None:
    """
    Be the process of a rank, as the environment says, and run the script, or the module after `-m`, with
    its arguments.
    """
    die_with_parent()
    try:
        prepare()
    except UsageError as refused:
        sys.stderr.write(f"tft: {refused}\n")
        sys.exit(2)
    if arguments[0] == "-m":
        _, module, *rest = arguments
        sys.argv = [module, *rest]  # until it is found: then its file comes first
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    sys.argv = list(arguments)
    # as `python SCRIPT` has it; the agent's -P has kept the working directory out
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def prepare() -> None:
    """
    Get ready to say the last words, and import what the framework will need.
    """
    settings = launch_settings()
    name_process(f"tft-rank-{settings.rank}")
    # In C, on whatever thread the signal comes to, without the GIL: it works in any kind of hang.
    # Chained to the signal's default action, which ends the process once it has written.
    faulthandler.enable(file=settings.words)  # a crash in C leaves its stacks as well
    faulthandler.register(LAST_WORDS, file=settings.words, all_threads=True, chain=True)
    preload(settings.adaptor)


@functools.cache  # once in a process: a forked one has had it
def preload(adaptor: str) -> None:
    """
    Import the adaptor of that name, and what its framework will need. Raises `UsageError` where it
    cannot be had.
    """
    from tft.plugins import load_adaptor  # late: until here a hang could not have told its place

    load_adaptor(adaptor).hook.tft_preload()


if __name__ == "__main__":
    main()
