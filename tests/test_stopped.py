"""
A child that was stopped is continued by its parent: real processes and signals.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tft import stopped
from tft.stopped import StopGuard, is_stopped

SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]


@contextmanager
def guarded() -> Iterator[tuple[subprocess.Popen[bytes], StopGuard, asyncio.Event]]:
    """
    Yield a child, its guard, and an event that is set when the child was continued.
    """
    child = subprocess.Popen(SLEEPS)
    continued = asyncio.Event()
    guard = StopGuard(child.pid, continued.set)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, guard.look)
    try:
        yield child, guard, continued
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
        guard.close()
        child.kill()
        child.wait()


def stop(child: subprocess.Popen[bytes]) -> None:
    """
    Stop a child, and wait until it is stopped.
    """
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


async def test_stopped_child_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a child is stopped for the limit, then it is continued, each time."""
    monkeypatch.setattr(stopped, "LIMIT", 0.05)
    with guarded() as (child, _, continued):
        for _ in range(2):
            child.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(continued.wait(), 10.0)
            continued.clear()
            assert not is_stopped(child.pid)


async def test_child_that_was_continued_in_time_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When somebody else continues a child within the limit, then nothing is reported."""
    monkeypatch.setattr(stopped, "LIMIT", 0.2)
    with guarded() as (child, guard, continued):
        stop(child)
        guard.look()
        child.send_signal(signal.SIGCONT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(continued.wait(), 0.4)


async def test_child_whose_guard_is_closed_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the guard of a stopped child is closed, because the child is about to be reaped, then no
    signal is sent to its pid any more."""
    monkeypatch.setattr(stopped, "LIMIT", 0.1)
    with guarded() as (child, guard, continued):
        stop(child)
        guard.look()
        guard.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(continued.wait(), 0.3)
        guard.look()
        assert is_stopped(child.pid)


def test_process_that_is_gone_is_not_stopped() -> None:
    """When a process does not exist any more, then it is not stopped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_stopped(child.pid)
    assert not is_stopped(os.getpid())
