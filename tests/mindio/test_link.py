"""
Tests of the socket between the controller and the program that manages the cluster.
"""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindio_ttp.link import Desk, Line

from tests.e2e.jobs import until

LIMIT = 10.0


def guest(path: Path, heard: Callable[[str, list[Any]], None] = lambda name, facts: None) -> Line:
    """
    Connect an orchestrator to the socket at `path`; `heard` receives its reports.
    """
    line = Line(path, heard)
    assert line.there(LIMIT)
    return line


def test_the_end_of_a_replaced_orchestrator_is_not_reported(tmp_path: Path) -> None:
    """When a second orchestrator has replaced the first and the first one leaves, then no change is
    reported. Otherwise the second one would get the open incident twice. When the active
    orchestrator leaves, then a change is reported."""
    desk, changes, calls = Desk(tmp_path / "desk"), queue.SimpleQueue[None](), []

    def call(name: str, arguments: list[Any], *, speaks: bool) -> int:
        calls.append((name, arguments, speaks))
        return 0

    desk.open(call, lambda: changes.put(None))
    first = guest(tmp_path / "desk")
    changes.get(timeout=LIMIT)
    second = guest(tmp_path / "desk")
    changes.get(timeout=LIMIT)
    first.close()
    # the only further change is the arrival of this guest, and none for the end of the first one
    third = guest(tmp_path / "desk")
    changes.get(timeout=LIMIT)
    assert third.call("hello") == 0
    assert second.call("hello") == 0
    assert changes.empty()
    assert calls == [("hello", [], True), ("hello", [], False)]
    third.close()
    changes.get(timeout=LIMIT)
    second.close()
    changes.get(timeout=LIMIT)
    # nothing says when the end of the first one has been seen
    until(lambda: not desk.present(), "no orchestrator is left")
