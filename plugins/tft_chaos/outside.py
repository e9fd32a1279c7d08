"""
The targets that are no ranks: processes of tft's own, ended by the agent of their node.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tft_chaos.proc import main_thread
from tft_chaos.record import Firing, Ledger
from tft_chaos.spec import Process, Spec, Stop


def strike_processes(specs: Sequence[Spec], run_dir: Path, node: int, step: int) -> None:
    """
    Send their signals to the processes of this node whose step has been completed. A process
    that is not up at that moment is struck at a later step.
    """
    ledger = Ledger(run_dir)
    for index, spec in enumerate(specs):
        if not isinstance(spec.target, Process) or spec.target.node != node:
            continue
        fired = ledger.fired(index)
        if fired >= spec.count or step < spec.step + fired:
            continue
        pid = _living(run_dir / "pids" / f"{spec.target.name}.pid")
        if pid is None:
            continue
        firing = Firing(
            spec=spec.text,
            at=time.monotonic(),
            rank=None,
            incarnation=None,
            step=step,
            phase=None,
            evidence={"process": spec.target.name, "pid": pid},
        )
        if ledger.enter(index, fired + 1, firing):
            os.kill(pid, signal.SIGSTOP if isinstance(spec.action, Stop) else signal.SIGKILL)


def _living(path: Path) -> int | None:
    """
    The process named in a pid file, unless it is gone or has ended already.
    """
    try:
        pid = int(path.read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or just being written
        return None
    thread = main_thread(pid)
    return pid if thread is not None and thread.state != "Z" else None
