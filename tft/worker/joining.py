"""
`tft.init`: how a training process joins its job.
"""

import sys
from collections.abc import Sequence

from tft.clock import SystemClock
from tft.config import rank_settings, started_by_agent
from tft.errors import UsageError
from tft.limits import raise_open_files
from tft.worker.external_start import stand_aside, take_up
from tft.worker.launcher_bootstrap import become_launcher
from tft.worker.launchers import Launcher
from tft.worker.session import Session
from tft.worker.warm import WarmSession, is_warm

_session: Session | None = None


def init(launcher: Launcher | None = None, options: Sequence[str] = ()) -> Session:
    """
    Join the job for which this process was started, and return its session.

    Later calls return the same session. If torchrun, srun or another launcher has started this
    process, `init` does not return: the process replaces itself by the command `tft run`. That
    command starts another process for the rank, which runs the script from its beginning.
    `launcher` gives the rank and the machine of this process if the environment does not name them.
    `options` are additional options of `tft run`.

    In a warm process (`tft run --warm-ranks`) the first use of the session waits until a rank is
    lost. The warm process then takes the place of the lost rank.

    If another launcher has started this process, but `tft run` cannot be started, the process
    prints the reason in one line and exits with code 2. It prints no traceback, because every
    process of the job would print the same traceback. If the caller gave `launcher`, `UsageError`
    is raised instead. Also raises `UsageError` if the process was not started as one process of a
    job.
    """
    global _session
    if _session is None:
        _session = WarmSession() if is_warm() else _join(launcher, options)
    return _session


def _join(launcher: Launcher | None, options: Sequence[str]) -> Session:
    at = SystemClock().now()
    if not started_by_agent():
        stand_aside()
        try:
            become_launcher(launcher, options)
        except UsageError as refused:
            if launcher is not None:
                raise
            sys.stderr.write(f"tft: {refused}\n")
            sys.exit(2)
    take_up()
    settings = rank_settings()
    # raise the limit of open files here too: no agent has raised it if another program started this
    # process
    raise_open_files(f"rank {settings.rank}")
    return Session(settings).open(at)
