"""
A rank that calls what it is told to, in order, and writes down what came of each:

    calls.py PORT RING DIRECTORY STEPS OPTIONS

`calls` of OPTIONS is a list of [function, arguments, keyword arguments]. `$port` is the port. `train` is none of
MindIO's: it trains so many steps.
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
    Nothing is changed, and nobody says where it can be stopped.
    """
    for step in range(1, steps + 1):
        framework_ttp.tft_start_updating_os()
        framework_ttp.tft_end_updating_os(step)
        if step == 10:
            (directory / "trains").touch()


def call(name: str, arguments: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """
    What came of it.
    """
    places = (framework_ttp, controller_ttp, utils)
    known = [getattr(place, name) for place in places if hasattr(place, name)]
    function = [*known, train][0]
    try:
        returned = function(*(port if told == "$port" else told for told in arguments), **named)
    except Exception as error:  # noqa: BLE001 (that is what is looked at)
        return {"raised": type(error).__mro__[0].__name__, "says": str(error)}
    return {"returned": returned}


results = []
for name, *rest in options["calls"]:
    arguments, named = [*rest, [], {}][:2] if rest else ([], {})
    results.append(call(name, arguments, named if isinstance(named, dict) else {}))
    (directory / f"results-{rank}.json").write_text(json.dumps(results))
