"""
Makes faults in tft's own processes that have no rank, such as the broker. The agent of the node on
which such a process runs sends the signals.
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
    Send SIGKILL or SIGSTOP to processes of tft on this node, as `specs` (the arguments of
    `--chaos`) ask. Call this function when `step` is complete. It carries out the specs that are
    due at this step.

    A process that does not run at that time gets its signal after a later step.
    """
    ledger = Ledger(run_dir)
    for index, spec in enumerate(specs):
        if not isinstance(spec.target, Process) or spec.target.node != node:
            continue
        fired = ledger.fired(str(index))
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
        if ledger.enter(str(index), fired + 1, firing):
            os.kill(pid, signal.SIGSTOP if isinstance(spec.action, Stop) else signal.SIGKILL)


def _living(path: Path) -> int | None:
    """
    Return the pid in a pid file. Return None if that process has ended or the file is missing.
    """
    try:
        pid = int(path.read_text())
    except (FileNotFoundError, ValueError):  # the pid file is missing or not fully written yet
        return None
    thread = main_thread(pid)
    return pid if thread is not None and thread.state != "Z" else None
