"""
The robust mutex that shows the end of a thread, with real processes.
"""

import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tft.agent.death_watch import DeathWatch, ending_code
from tft.page import Page
from tft.robust_mutex import SIZE, RobustMutex

LIMIT = 20.0
MANY = 400 * 2**20
"""Bytes that take the kernel some tens of milliseconds to free."""


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create()
    yield made
    made.close()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], int]]:
    """
    A function that runs another one in a process of its own, and returns the pid once the function
    has returned. The process then lives on.
    """
    pids = []

    def fork(function: Callable[[], object]) -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            function()
            os.write(writing, b"x")
            signal.pause()
        pids.append(pid)
        os.close(writing)
        assert select.select([reading], [], [], LIMIT)[0]
        assert os.read(reading, 1) == b"x"
        os.close(reading)
        return pid

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # the process is not reaped yet
        os.waitpid(pid, 0)


def test_a_mutex_that_nobody_holds_is_free() -> None:
    """When nobody holds the mutex, then a wait ends at once and finds no death."""
    with mmap.mmap(-1, SIZE) as memory:
        mutex = RobustMutex(memory, 0)
        mutex.create()
        assert not mutex.is_held()
        assert not mutex.wait()
        assert mutex.hold()
        mutex.close()


def test_the_next_process_holds_what_a_killed_one_held(
    page: Page, forked: Callable[[Callable[[], object]], int]
) -> None:
    """When a process was killed while nobody watched, then the next process of the rank shows that
    it lives, as the first one did."""
    first = forked(page.live)
    assert page.is_alive()
    pidfd = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    assert select.select([pidfd], [], [], LIMIT)[0]
    os.close(pidfd)
    assert not page.is_alive()
    forked(page.live)
    assert page.is_alive()


def test_death_is_known_before_memory_is_freed(
    page: Page, forked: Callable[[Callable[[], object]], int]
) -> None:
    """When a process with much memory is killed, then its end and its signal are known before the
    kernel reports them through its pidfd."""

    def begin() -> None:
        held = bytearray(MANY)
        held[:: mmap.PAGESIZE] = b"x" * (MANY // mmap.PAGESIZE)
        globals()["held"] = held
        page.live()

    pid = forked(begin)
    codes: list[tuple[int, bool]] = []
    known = threading.Event()
    pidfd = os.pidfd_open(pid)

    def ending(code: int) -> None:
        codes.append((code, bool(select.select([pidfd], [], [], 0)[0])))
        known.set()

    watch = DeathWatch(page, pid, ending)
    # the watch waits for the mutex as soon as it has seen that it is held
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert known.wait(LIMIT)
    watch.stop()
    os.close(pidfd)
    assert codes == [(-signal.SIGKILL, False)]


def test_nothing_is_said_of_a_process_that_lives_or_is_gone(
    page: Page, forked: Callable[[Callable[[], object]], int]
) -> None:
    """When a process lives, or there is none of that number, then it is not called ending."""
    assert ending_code(forked(page.live)) is None
    assert ending_code(2**22 - 1) is None


def test_a_watch_ends_with_a_process_that_never_lived(page: Page) -> None:
    """When a process ends before it has shown that it lives, then the watch ends, too."""
    said: list[int] = []
    watch = DeathWatch(page, os.getpid(), said.append)
    assert any(thread.name == "tft-death-watch" for thread in threading.enumerate())
    watch.stop()
    for thread in threading.enumerate():
        if thread.name == "tft-death-watch":
            thread.join(LIMIT)
            assert not thread.is_alive()
    assert not said
