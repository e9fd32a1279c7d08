"""
The functions that msrun calls, in this order: `init_taskd_agent` before it starts its scheduler
process, and the other functions after that.
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
    them itself. `settings` names the framework.

    msrun calls this function before it starts any process. If tft cannot run the job as requested,
    this function prints the reason and ends msrun with exit code 2.
    """
    global _node
    if settings.get("Framework") != "MindSpore":
        _say(
            f"the package taskd of tft supports only MindSpore, not {settings.get('Framework')}: "
            "msrun manages its processes itself"
        )
        return False
    from mindspore.parallel.cluster.run import get_args  # late: MindSpore may not be installed

    try:
        facts = facts_of(get_args(), os.environ)
        if facts is None:
            _say("tft does not supervise a dry run (sim_level or MS_SIMULATION_LEVEL is set)")
            return False
        _node = facts.node()
    except UsageError as refused:
        _say(str(refused))
        sys.exit(_REFUSED)
    # set variables for the scheduler process, which msrun starts next and which has no rank
    os.environ.update(_node.beside())
    return True


def register_func(name: str, function: Callable[..., Any]) -> None:
    """
    Register a function of msrun that starts (START_WORKER_LIST), ends (KILL_WORKER) or monitors
    (MONITOR) its processes.
    """
    _functions[name] = function


def start_taskd_agent() -> None:
    """
    Run the node of this msrun until the job is over. If the exit code of `tft run` would not be 0,
    end msrun with this exit code.
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
