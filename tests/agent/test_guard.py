"""
The loss of the agent itself: nothing of its node is left, whatever the ranks had started.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

from tests.agent.stage import PAGE, Stage, gone
from tft.protocol.messages import StoreOpened

STUBBORN = """
import os, signal
for number in range(1, signal.SIGRTMAX + 1):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
os.setsid()
if os.fork() == 0:
    print("adrift", flush=True)
    os.close(1)
    while True:
        signal.pause()
"""
"""A grandchild that has left its session, lost its parent and ignores every signal it can."""

FAMILY = (
    PAGE
    + f"""
adrift = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
adrift.stdout.read()  # until it is what it is to be
say(1)
signal.pause()
"""
)


async def test_a_killed_agent_leaves_no_process(stage: Stage) -> None:
    """
    When the agent is killed with SIGKILL, everything it or its ranks have started ends.
    """
    agent = await stage.agent(FAMILY, nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.said(1, rank=rank)
    alive = stage.alive()
    assert len(alive) == 1 + 3 + 2 * 2, "the agent, its keepers, two ranks and what they started"
    killed = time.monotonic()
    agent.kill()
    agent.wait()
    await asyncio.gather(*map(gone, alive))

    assert time.monotonic() - killed < 2.0
    assert stage.alive() == []


async def test_a_lost_guard_is_replaced(stage: Stage) -> None:
    """
    When the guard is killed, another one takes its place and does its work.
    """
    agent = await stage.agent(FAMILY)
    await stage.start()
    await stage.said(1)
    [first] = _guards(stage)
    os.kill(first, signal.SIGKILL)
    await gone(first)
    while not _guards(stage):
        await stage.beat()
    alive = stage.alive()
    agent.kill()
    agent.wait()
    await asyncio.gather(*map(gone, alive))

    assert stage.alive() == []


async def test_the_guard_does_not_end_before_its_agent(stage: Stage) -> None:
    """
    When somebody ends everything politely, the guard stays until the agent has ended.
    """
    agent = await stage.agent(FAMILY)
    await stage.report(StoreOpened)
    [guard] = _guards(stage)
    agent.send_signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    agent.kill()
    agent.wait()
    await gone(guard)

    status = (stage.tmp / "err").read_text()
    assert "guard_ended" not in status
    assert stage.alive() == []


def _guards(stage: Stage) -> list[int]:
    return [
        pid
        for pid in stage.alive()
        if b"tft.agent.guard" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
