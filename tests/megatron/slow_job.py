"""
The example of megatron-core, in which one rank becomes slow.

    slow_job.py RANK PART PERCENT SINCE ARGUMENTS...

From the step SINCE on, PART (`forward` or `backward`) takes PERCENT longer on
RANK. ARGUMENTS are those of the example.
"""

import functools
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

import tft

EXAMPLE = "examples/megatron_gpt"
RANK, PART, PERCENT, SINCE = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
sys.argv[1:] = sys.argv[5:]
sys.path.insert(0, EXAMPLE)
sessions: list[tft.Session] = []
_init = tft.init


def init(*arguments: Any, **more: Any) -> tft.Session:  # Any: passed on to tft
    """
    Note the session of this process.
    """
    sessions.append(_init(*arguments, **more))
    return sessions[0]


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function, which takes longer on the rank that shall be slow.
    """

    @functools.wraps(function)
    def slow(*arguments: Any, **more: Any) -> Any:
        began = time.monotonic()
        result = function(*arguments, **more)
        if sessions[0].rank == RANK and sessions[0].step >= SINCE:
            time.sleep(PERCENT / 100 * (time.monotonic() - began))
        return result

    return slow


tft.init = init
import pieces  # noqa: E402  # after the path to it is known

if PART == "forward":
    pieces.forward_step = slowed(pieces.forward_step)
else:
    schedules.backward_step = slowed(schedules.backward_step)
runpy.run_path(f"{EXAMPLE}/train.py", run_name="__main__")
