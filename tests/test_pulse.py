"""
A process that writes no sign of life for too long hangs: real pipes.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

import pytest

from tft import pulse
from tft.pulse import BYTE, Pulse, PulseWatch

LIMIT = 10.0


@contextmanager
def watched() -> Iterator[tuple[PulseWatch, FileIO, asyncio.Event]]:
    """
    Yield a watch, the writing end of its pipe, and an event that is set when the writer hangs.
    """
    reading, writing = os.pipe()
    hangs = asyncio.Event()
    watch = PulseWatch(reading, hangs.set)
    with FileIO(writing, "w") as writer:
        try:
            yield watch, writer, hangs
        finally:
            watch.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Make the times short.
    """
    monkeypatch.setattr(pulse, "BEAT", 0.02)
    monkeypatch.setattr(pulse, "LIMIT", 0.2)


async def test_writer_that_stops_writing_hangs() -> None:
    """When a process has written and then writes nothing for the limit, then it hangs, and this is
    told once. When it goes on and then writes nothing again, this is told again."""
    with watched() as (_, writer, hangs):
        for _ in range(2):
            writer.write(BYTE)
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
    with watched() as (_, writer, hangs):
        beats = Pulse(os.dup(writer.fileno()))
        if how == "loop":
            beats.beat_in_loop()
        else:
            beats.beat_in_thread()
        await asyncio.sleep(0.6)
        assert not hangs.is_set()


async def test_reader_that_did_not_run_itself_waits_on() -> None:
    """When the reader was blocked for longer than the limit, and the writer has written meanwhile, then
    the writer does not hang."""
    with watched() as (_, writer, hangs):
        writer.write(BYTE)
        await asyncio.sleep(0.05)
        command = f"import os, time; time.sleep(0.4); os.write({writer.fileno()}, b'.')"
        subprocess.run([sys.executable, "-c", command], pass_fds=(writer.fileno(),), check=True)  # noqa: ASYNC221  # blocks the reader
        await asyncio.sleep(0.05)
        assert not hangs.is_set()


async def test_reader_that_did_not_run_gives_the_writer_another_chance() -> None:
    """When neither the reader nor the writer has run for longer than the limit, as when a container is
    frozen, then the writer does not hang at once. It hangs if it does not go on."""
    with watched() as (_, writer, hangs):
        writer.write(BYTE)
        await asyncio.sleep(0.05)
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.4)"], check=True)  # noqa: ASYNC221  # blocks the reader
        await asyncio.sleep(0.1)
        assert not hangs.is_set()
        await asyncio.wait_for(hangs.wait(), LIMIT)


async def test_process_that_ends_slowly_does_not_hang() -> None:
    """When a process writes no more because it ends, and takes longer than the limit, then it does not
    hang."""
    with watched() as (_, writer, hangs):
        beats = Pulse(os.dup(writer.fileno()))
        writer.close()
        beats.beat_in_loop()
        await asyncio.sleep(0.05)
        beats.close()
        await asyncio.sleep(0.5)
        assert not hangs.is_set()


async def test_writer_that_has_ended_does_not_hang() -> None:
    """When the process has ended, so that its end of the pipe is closed, then it does not hang."""
    with watched() as (_, writer, hangs):
        writer.write(BYTE)
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.5)
        assert not hangs.is_set()


async def test_writer_without_a_reader_goes_on_and_keeps_the_pipe_to_itself() -> None:
    """When nobody reads any more, then the writer goes on. Its children do not get the pipe."""
    with watched() as (watch, writer, _):
        watch.close()
        descriptor = writer.fileno()
        os.set_inheritable(descriptor, True)
        beats = Pulse(descriptor)
        assert not os.get_inheritable(descriptor)
        beats.beat_in_loop()
