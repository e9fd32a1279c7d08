"""
The signals that ask a job to end.
"""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask `tft run` to end the job."""


def heeded() -> list[signal.Signals]:
    """
    Return those of the signals in `ENDING` that this process must heed. A SIGHUP that is ignored,
    as under `nohup`, stays ignored: the job is to outlive its terminal.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if number != signal.SIGHUP or not ignored]
