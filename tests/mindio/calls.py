"""
A program that calls a list of MindIO functions in order and writes the result of each call.

    calls.py PORT RING DIRECTORY STEPS OPTIONS

The entry `calls` of OPTIONS is a list of [function, arguments, keyword arguments]. The argument
`$port` is replaced by the port. The function name `train` is not one of MindIO: it trains the given
number of steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mindio_ttp import controller_ttp, framework_ttp, utils

port, directory, options = int(sys.argv[1]), Path(sys.argv[3]), json.loads(sys.argv[5])
rank = int(os.environ.get("RANK", "0"))


def train(steps: int) -> None:
    """
    Train `steps` steps that change nothing, without a point where the job can be paused.
    """
    for step in range(1, steps + 1):
        framework_ttp.tft_start_updating_os()
        framework_ttp.tft_end_updating_os(step)
        if step == 10:
            (directory / "trains").touch()


def call(name: str, arguments: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """
    Call the function of this name and return its result or its error.
    """
    places = (framework_ttp, controller_ttp, utils)
    known = [getattr(place, name) for place in places if hasattr(place, name)]
    function = [*known, train][0]
    try:
        returned = function(*(port if told == "$port" else told for told in arguments), **named)
    except Exception as error:  # noqa: BLE001 (any error is a result of the call)
        return {"raised": type(error).__mro__[0].__name__, "says": str(error)}
    return {"returned": returned}


results = []
for name, *rest in options["calls"]:
    arguments, named = [*rest, [], {}][:2] if rest else ([], {})
    results.append(call(name, arguments, named if isinstance(named, dict) else {}))
    (directory / f"results-{rank}.json").write_text(json.dumps(results))
