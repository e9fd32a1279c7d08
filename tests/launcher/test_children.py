"""
The processes of the launcher: it sees the end of each.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tft.bus.ports import free_address
from tft.bus.zeromq import open_bus
from tft.launcher.children import Children, LaunchedProcess
from tft.protocol.topics import presence


async def test_exit_status_and_output_of_a_child_are_kept(tmp_path: Path) -> None:
    """When a child process ends, then its exit status is known and its output is in its log."""
    log = tmp_path / "part.log"
    with Children() as children:
        child = children.start(["no-such-command"], added={}, log=log)

        assert await child.ended() == 2
        assert await children.gone(0.0)
    assert "no-such-command" in log.read_text()


async def test_broker_that_is_told_to_end_exits_with_0(tmp_path: Path) -> None:
    """When a broker is told to end, then the broker exits with 0 and is not killed."""
    with Children() as children:
        child = await _broker(children, tmp_path)
        await child.end(grace=0.0, patience=20.0)

        assert await child.ended() == 0


async def test_stopped_broker_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    """When a broker is stopped by SIGSTOP and told to end, then the broker is killed by SIGKILL."""
    with Children() as children:
        child = await _broker(children, tmp_path)
        child.send(signal.SIGSTOP)
        await child.end(grace=0.0, patience=0.1)

        assert await child.ended() == -signal.SIGKILL


async def test_launcher_waits_for_orphans_of_its_children() -> None:
    """When a process ends before its own child process, then the launcher also waits for that child
    process and reaps it."""
    with Children() as children:
        orphan = _orphan()

        assert not await children.gone(0.05)
        os.kill(orphan, signal.SIGKILL)
        assert await children.gone(10.0)
        with pytest.raises(ProcessLookupError):
            os.kill(orphan, 0)


async def _broker(children: Children, folder: Path) -> LaunchedProcess:
    """
    Return a broker that accepts connections.
    """
    address = free_address("127.0.0.1")
    port = address.partition(":")[2]
    child = children.start(["broker", "--port", port], added={}, log=folder / "broker.log")
    async with open_bus(address, job="j", sender="test", topics=[]) as bus:
        await bus.listened(presence("j", "test"))
    return child


def _orphan() -> int:
    """
    Return the pid of a process whose parent has ended.
    """
    script = "sleep 60 >/dev/null & echo $!"
    return int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)
