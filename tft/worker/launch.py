"""
How the process of a rank begins: `python -m tft.worker.launch SCRIPT ARGS...`, run by an agent.

Before the script starts, the process ties its life to the agent's, gets ready to say its last
words, and imports what the framework will need. Then it is an ordinary Python that runs the
script, whether or not that ever calls `tft.init`.
"""

import faulthandler
import os
import runpy
import sys

from tft.config import launch_settings
from tft.errors import UsageError
from tft.lifeline import LAST_WORDS, die_with_parent


def main() -> None:
    """
    Run the script named on the command line. What it raises is shown, and the status is the one
    that Python itself would end with; 2 where the process was started wrongly.
    """
    die_with_parent()
    try:
        _prepare()
    except UsageError as refused:
        sys.stderr.write(f"tft: {refused}\n")
        sys.exit(2)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    # as `python SCRIPT` has it; the agent's -P has kept the working directory out
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _prepare() -> None:
    settings = launch_settings()
    # In C, on whatever thread the signal comes to, without the GIL: it works in any kind of hang.
    # Chained to the signal's default action, which ends the process once it has written.
    faulthandler.register(LAST_WORDS, file=settings.words, all_threads=True, chain=True)

    from tft.plugins import load_adaptor  # late: until here a hang could not have told its place

    load_adaptor(settings.adaptor).hook.tft_preload()


if __name__ == "__main__":
    main()
