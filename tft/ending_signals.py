"""
The signals that ask a job to end.
"""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask `tft run` to end the job."""


def heeded() -> list[signal.Signals]:
    """
    Return the signals in `ENDING` that this process must handle. SIGHUP is left out if the process
    ignores it, as under `nohup`: then the job must go on when its terminal is closed.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if number != signal.SIGHUP or not ignored]
