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
    assert len(alive) == 1 + 3 + 2 * 2, "the agent, its sidecars, two ranks and what they started"
    killed = time.monotonic()
    agent.kill()
    agent.wait()
    await asyncio.gather(*map(gone, alive))

    assert time.monotonic() - killed < 2.0
    assert stage.alive() == []


async def test_a_lost_reaper_is_replaced(stage: Stage) -> None:
    """
    When the reaper is killed, another one takes its place and does its work.
    """
    agent = await stage.agent(FAMILY)
    await stage.start()
    await stage.said(1)
    [first] = _reapers(stage)
    os.kill(first, signal.SIGKILL)
    await gone(first)
    while not _reapers(stage):
        await stage.beat()
    alive = stage.alive()
    agent.kill()
    agent.wait()
    await asyncio.gather(*map(gone, alive))

    assert stage.alive() == []


async def test_the_reaper_does_not_end_before_its_agent(stage: Stage) -> None:
    """
    When somebody ends everything politely, the reaper stays until the agent has ended.
    """
    agent = await stage.agent(FAMILY)
    await stage.report(StoreOpened)
    [reaper] = _reapers(stage)
    agent.send_signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(reaper, number)
    agent.kill()
    agent.wait()
    await gone(reaper)

    status = (stage.tmp / "err").read_text()
    assert "reaper_ended" not in status
    assert stage.alive() == []


def _reapers(stage: Stage) -> list[int]:
    return [
        pid
        for pid in stage.alive()
        if b"tft.agent.reaper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
