"""
The functions that msrun, the launcher of MindSpore, calls. msrun calls `init_taskd_agent` before it
starts its scheduler process. After that, it calls `register_func` and then `start_taskd_agent`.
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
"""The exit code of the command `tft run` for a job that is refused before any process has
started."""

_node: Node | None = None
"""The object that runs this node of the job. None before `init_taskd_agent` was called."""
# Any: the functions have arguments and results of any type
_functions: dict[str, Callable[..., Any]] = {}
"""Maps a name such as `KILL_WORKER` to the function that msrun has registered under it."""


def init_taskd_agent(settings: dict[str, str]) -> bool:
    """
    Return whether tft manages the processes of this msrun, the launcher of MindSpore. If the result
    is False, msrun manages its processes itself. `settings` names the training framework.

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
    # imported here, because MindSpore may not be installed
    from mindspore.parallel.cluster.run import get_args

    try:
        facts = facts_of(get_args(), os.environ)
        if facts is None:
            _say("tft does not supervise a dry run (sim_level or MS_SIMULATION_LEVEL is set)")
            return False
        _node = facts.node()
    except UsageError as refused:
        _say(str(refused))
        sys.exit(_REFUSED)
    # set environment variables for the scheduler process of MindSpore, which has no rank, because
    # msrun starts this process next
    os.environ.update(_node.beside())
    return True


def register_func(name: str, function: Callable[..., Any]) -> None:
    """
    Register `function`, a function of msrun that starts, ends or monitors the processes of msrun.
    `name` says which: START_WORKER_LIST, KILL_WORKER or MONITOR.
    """
    _functions[name] = function


def start_taskd_agent() -> None:
    """
    Run this node of the job until the job is over. If the job has failed, end msrun with the exit
    code that the command `tft run` gives to the failure. Return if the exit code is 0.
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
