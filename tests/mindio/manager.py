"""
What manages a cluster, in a process that trains nothing.

    manager.py WORLD PORT DIRECTORY OPTIONS

It writes what it hears, and does what the lines of its standard input say: a call of
`mindio_ttp.controller_ttp` without its prefix, and its arguments as JSON; the result is a line of its output.
`restart` is not such a call: MindCluster's manager destroys the controller and starts it again when a pod is
rescheduled. At the end of its input it ends without a word to the controller, as a program does that leaves that
to its exit.
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


def start() -> None:
    """
    As MindCluster's manager does.
    """
    Stub(note, options.get("choices", {})).register()
    controller.tft_init_controller(-1, world, False, True, False)
    controller.tft_start_controller("127.0.0.1", port, False, "")


structlog.configure(
    logger_factory=structlog.PrintLoggerFactory(sys.stderr)
)  # its output is answers
start()
say("leads")
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "restart":
        controller.tft_destroy_controller()
        start()
        say("null")
        continue
    given = [
        {int(rank): kind for rank, kind in each.items()} if isinstance(each, dict) else each
        for each in arguments
    ]
    say(json.dumps(getattr(controller, f"tft_{name}")(*given)))
