"""
The stack trace of a rank that hangs: the rank writes it before the agent kills the process.
"""

import signal
import time
from pathlib import Path

import pytest

from tests.agent.stage import PAGE, Stage, gone
from tft.agent.ranks import LAST_WORDS_LIMIT
from tft.protocol.messages import Exited, Kill, Spawned

PRELUDE = (
    PAGE
    + """
import ctypes, threading

def beside():
    threading.Event().wait()

def hanging(hang):
    threading.Thread(target=beside, daemon=True).start()
    say(1)
    hang()
"""
)

HANGS = {
    "waiting": "hanging(threading.Event().wait)",
    "holding_the_gil": "hanging(ctypes.PyDLL(None).pause)",
    "stopped": "hanging(lambda: os.kill(os.getpid(), signal.SIGSTOP))",
    "computing": "hanging(lambda: sum(iter(int, 1)))",
}


@pytest.mark.parametrize(
    "hang",
    [pytest.param(name, marks=() if name == "waiting" else pytest.mark.soak) for name in HANGS],
)
async def test_hanging_rank_reports_the_stacks_of_all_threads(stage: Stage, hang: str) -> None:
    """When a hanging rank is killed with last words, then its exit report has the stacks of all its
    threads."""
    await stage.agent(PRELUDE + HANGS[hang])
    await stage.start()
    spawned = await stage.report(Spawned)
    await stage.said(1)
    if hang == "stopped":
        await _stopped(stage, spawned.pid)
    asked = time.monotonic()
    stage.order(_kill())
    exited = await stage.report(Exited)
    await gone(spawned.pid)

    assert time.monotonic() - asked < 1.0
    assert "in hanging" in exited.stack
    assert "in beside" in exited.stack
    assert exited.stopped == (hang == "stopped")


async def test_rank_that_blocks_the_signal_is_killed_without_a_stack(stage: Stage) -> None:
    """When a rank blocks the signal for last words, then it is killed after the limit, and its
    reported stack is empty."""
    await stage.agent(
        PAGE + "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); say(1); signal.pause()"
    )
    await stage.start()
    await stage.said(1)
    for _ in range(3):  # a controller repeats its orders
        stage.order(_kill())
    asked = time.monotonic()
    exited = await stage.report(Exited)

    assert (exited.code, exited.stack) == (-signal.SIGKILL, "")
    assert LAST_WORDS_LIMIT <= time.monotonic() - asked < LAST_WORDS_LIMIT + 0.5


async def test_rank_that_is_killed_without_last_words_reports_no_stack(stage: Stage) -> None:
    """When no last words are requested, then a stopped rank is killed at once, and its exit report
    says that it was stopped."""
    await stage.agent(PRELUDE + HANGS["stopped"])
    await stage.start()
    spawned = await stage.report(Spawned)
    await stage.said(1)
    await _stopped(stage, spawned.pid)
    stage.order(_kill(last_words=False))
    exited = await stage.report(Exited)

    assert (exited.code, exited.stack, exited.stopped) == (-signal.SIGKILL, "", True)


def _kill(*, last_words: bool = True) -> Kill:
    return Kill(epoch=1, node=0, rank=0, incarnation=0, last_words=last_words, cause="test")


async def _stopped(stage: Stage, pid: int) -> None:
    while _state(pid) != "T":
        await stage.beat()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
