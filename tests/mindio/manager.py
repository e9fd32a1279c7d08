"""
A cluster manager in its own process. The process trains nothing.

    manager.py WORLD PORT DIRECTORY OPTIONS

The manager writes each report that it hears to a file. Each line on its standard input is a call:
the name of a function of `mindio_ttp.controller_ttp` without the prefix `tft_`, and its arguments
as JSON. The manager prints the result as one line.

The line `restart` is not such a function: the manager destroys the controller and starts it again,
as MindCluster's manager does when a pod is rescheduled. At the end of its input the manager exits
without destroying the controller, as some programs do.
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
    Append a report that the manager has heard to `heard.jsonl`.
    """
    with (directory / "heard.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, **facts}) + "\n")


def say(line: str) -> None:
    """
    Write a line to the process that has started this manager.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def start() -> None:
    """
    Start the controller with the calls of MindCluster's manager.
    """
    Stub(note, options.get("choices", {})).register()
    controller.tft_init_controller(-1, world, False, True, False)
    controller.tft_start_controller("127.0.0.1", port, False, "")


# stdout carries the answers, so logs go to stderr
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
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
