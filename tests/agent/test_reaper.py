"""
The loss of the agent: all processes that the ranks of its node have started end too.
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
"""A script whose grandchild process has left the session, has lost its parent and ignores every
signal that can be ignored."""

FAMILY = (
    PAGE
    + f"""
adrift = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
adrift.stdout.read()  # until it is what it is to be
say(1)
signal.pause()
"""
)


async def test_no_process_remains_after_the_agent_is_killed(stage: Stage) -> None:
    """When the agent is killed with SIGKILL, then every process that it or its ranks started ends
    within 2 seconds."""
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


async def test_killed_reaper_is_replaced(stage: Stage) -> None:
    """When the reaper is killed, then a new reaper starts. After the agent is killed, the new
    reaper ends all processes."""
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


async def test_reaper_ignores_signals_until_its_agent_has_ended(stage: Stage) -> None:
    """When SIGTERM, SIGINT and SIGHUP are sent to the reaper, then the reaper stays until the agent
    has ended, and no process remains."""
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
