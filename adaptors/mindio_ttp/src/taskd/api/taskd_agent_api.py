"""
The functions that msrun calls, in this order, before and after it has started its scheduler.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from taskd.facts import facts_of
from taskd.processes import Processes
from tft.errors import UsageError
from tft.spi.launcher import Node

_REFUSED = 2
"""The exit code of `tft run` for a job that is refused before anything has started."""

_node: Node | None = None
_functions: dict[str, Callable[..., Any]] = {}  # Any: functions of any signature


def init_taskd_agent(settings: dict[str, str]) -> bool:
    """
    Return whether tft manages the processes of this msrun. If the result is False, msrun manages
    them itself.

    msrun has started no process when it calls this function. Ends msrun with a message if tft
    cannot run the job as requested.
    """
    global _node
    if settings.get("Framework") != "MindSpore":
        _say(f"taskd of tft is for MindSpore, and not for {settings.get('Framework')}")
        return False
    from mindspore.parallel.cluster.run import get_args  # late: MindSpore may not be installed

    try:
        facts = facts_of(get_args(), os.environ)
        if facts is None:
            _say("tft does not supervise a dry run")
            return False
        _node = facts.node()
    except UsageError as refused:
        _say(str(refused))
        sys.exit(_REFUSED)
    # for the scheduler, which msrun starts next: it belongs to the job but has no rank
    os.environ.update(_node.beside())
    return True


def register_func(name: str, function: Callable[..., Any]) -> None:
    """
    Register a function of msrun that starts, ends or monitors its processes.
    """
    _functions[name] = function


def start_taskd_agent() -> None:
    """
    Run the node of this msrun until the job is over. Ends msrun with the exit code of `tft run`,
    unless that is 0.
    """
    assert _node is not None, "msrun must call init_taskd_agent first"
    code = _node.run(
        Processes(
            start=_functions["START_WORKER_LIST"],
            kill=_functions["KILL_WORKER"],
            look=_functions["MONITOR"],
        )
    )
    if code:
        sys.exit(code)


def _say(sentence: str) -> None:
    sys.stderr.write(f"tft: {sentence}\n")
