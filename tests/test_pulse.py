"""
A process that writes no sign of life for too long hangs: real pipes.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tft import pulse
from tft.pulse import BYTE, Pulse, PulseWatch

LIMIT = 10.0


@contextmanager
def watched() -> Iterator[tuple[PulseWatch, int, asyncio.Event]]:
    """
    Yield a watch, the writing end of its pipe, and an event that is set when the writer hangs.
    """
    reading, writing = os.pipe()
    hangs = asyncio.Event()
    watch = PulseWatch(reading, hangs.set)
    try:
        yield watch, writing, hangs
    finally:
        watch.close()
        with suppress(OSError):
            os.close(writing)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Make the times short.
    """
    monkeypatch.setattr(pulse, "BEAT", 0.02)
    monkeypatch.setattr(pulse, "LIMIT", 0.2)


async def test_writer_that_stops_writing_hangs() -> None:
    """When a process has written and then writes nothing for the limit, then it hangs, and this is
    told once."""
    with watched() as (_, writing, hangs):
        os.write(writing, BYTE)
        await asyncio.wait_for(hangs.wait(), LIMIT)
        hangs.clear()
        await asyncio.sleep(0.5)
        assert not hangs.is_set()


async def test_writer_that_has_not_begun_does_not_hang() -> None:
    """When a process has written nothing yet, for example because it reads a long story, then it does
    not hang."""
    with watched() as (_, _, hangs):
        await asyncio.sleep(0.5)
        assert not hangs.is_set()


@pytest.mark.parametrize("how", ["loop", "thread"])
async def test_writer_that_goes_on_does_not_hang(how: str) -> None:
    """When a process writes all the time, from its event loop or from a thread, then it does not
    hang."""
    with watched() as (_, writing, hangs):
        beats = Pulse(os.dup(writing))
        if how == "loop":
            beats.beat_in_loop()
        else:
            beats.beat_in_thread()
        await asyncio.sleep(0.6)
        assert not hangs.is_set()


async def test_reader_that_did_not_run_itself_waits_on() -> None:
    """When the reader was blocked for longer than the limit, and the writer has written meanwhile, then
    the writer does not hang."""
    with watched() as (_, writing, hangs):
        os.write(writing, BYTE)
        await asyncio.sleep(0.05)
        command = f"import os, time; time.sleep(0.4); os.write({writing}, b'.')"
        subprocess.run([sys.executable, "-c", command], pass_fds=(writing,), check=True)  # noqa: ASYNC221  # blocks the reader
        await asyncio.sleep(0.05)
        assert not hangs.is_set()


async def test_writer_that_has_ended_does_not_hang() -> None:
    """When the process has ended, so that its end of the pipe is closed, then it does not hang."""
    with watched() as (_, writing, hangs):
        os.write(writing, BYTE)
        await asyncio.sleep(0.05)
        os.close(writing)
        await asyncio.sleep(0.5)
        assert not hangs.is_set()


async def test_writer_without_a_reader_goes_on_and_keeps_the_pipe_to_itself() -> None:
    """When nobody reads any more, then the writer goes on. Its children do not get the pipe."""
    with watched() as (watch, writing, _):
        watch.close()
        os.set_inheritable(writing, True)
        beats = Pulse(writing)
        assert not os.get_inheritable(writing)
        beats.beat_in_loop()
