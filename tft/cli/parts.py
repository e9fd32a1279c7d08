"""
Code that several commands use: the option `--run-dir`, and the function that runs a command until
the user leaves it.
"""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path

import click

from tft.launcher.exit_codes import COMPLETED


def run_dir_option() -> click.Option:
    """
    Return the option `--run-dir` of a command about one job.
    """
    return click.Option(
        ["--run-dir"],
        type=click.Path(path_type=Path),
        required=True,
        help="The run directory of the job.",
    )


def until_left(work: Coroutine[None, None, int]) -> int:
    """
    Run a command until it ends or the user leaves it. Return the exit code: that of the command, 0
    after Ctrl-C (the regular way to leave), or 143 after SIGTERM.

    SIGTERM cancels `work`, so that it can give back the terminal or close its connections.
    """

    async def cancellable() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except KeyboardInterrupt:
        return COMPLETED
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
