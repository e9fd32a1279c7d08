"""
The socket between the controller and what manages the cluster.
"""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindio_ttp.link import Desk, Line

LIMIT = 10.0


def guest(path: Path, heard: Callable[[str, list[Any]], None] = lambda name, facts: None) -> Line:
    """
    Connect an orchestrator.
    """
    line = Line(path, heard)
    assert line.there(LIMIT)
    return line


def test_an_orchestrator_that_is_not_heard_leaves_unnoticed(tmp_path: Path) -> None:
    """
    When one of two orchestrators leaves that the other has replaced, then no change is told: the one that is heard
    would be told the open incident once more. When the one that is heard leaves, a change is told.
    """
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
    third = guest(tmp_path / "desk")  # one change, and none of the first
    changes.get(timeout=LIMIT)
    assert third.call("hello") == 0
    assert second.call("hello") == 0
    assert changes.empty()
    assert calls == [("hello", [], True), ("hello", [], False)]
    third.close()
    changes.get(timeout=LIMIT)
    second.close()
    changes.get(timeout=LIMIT)
    assert not desk.present()
