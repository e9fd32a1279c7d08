"""
What manages a cluster, in a process that trains nothing.

    manager.py WORLD PORT DIRECTORY OPTIONS

It writes what it hears, and does what the lines of its standard input say: a call of
`mindio_ttp.controller_ttp` without its prefix, and its arguments as JSON; the result is a line of its output.
"""

import json
import sys
from pathlib import Path
from typing import Any

import structlog
from mindio_ttp import controller_ttp as controller

from tests.mindio.stub import Stub

world, port, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
options: dict[str, Any] = json.loads(sys.argv[4])


def note(what: str, **facts: Any) -> None:
    """
    A line of what was heard.
    """
    with (directory / "heard.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, **facts}) + "\n")


def say(line: str) -> None:
    """
    To whoever has started this.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


structlog.configure(
    logger_factory=structlog.PrintLoggerFactory(sys.stderr)
)  # its output is answers
controller.tft_init_controller(-1, world, False, enable_arf=True)
Stub(note, options.get("choices", {})).register()
controller.tft_start_controller("127.0.0.1", port, enable_tls=False)
say("leads")
for line in sys.stdin:
    name, *arguments = json.loads(line)
    given = [
        {int(rank): kind for rank, kind in each.items()} if isinstance(each, dict) else each
        for each in arguments
    ]
    say(json.dumps(getattr(controller, f"tft_{name}")(*given)))
controller.tft_destroy_controller()
