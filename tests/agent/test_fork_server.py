"""
Ranks and stores that are forked from a process that has already done the imports.

A script and the controller cannot tell these processes from processes that do the imports
themselves. If there is no fork server, all ranks and stores are started without it.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.stage import ADAPTOR, PAGE, THREADED, Stage, command_line, gone, package
from tft.protocol.messages import EndNode, Exited, Spawned, StoreOpened

UNABLE = """
import os

def fail():
    raise OSError(11, "Resource temporarily unavailable")

os.fork = fail
"""
"""A module after whose import no process can be forked."""
TRAINS = PAGE + "page.train(True, time.monotonic()); say(1); signal.pause()"

WAYS = ["forked", "executed"]

ENDS = {
    "a status": ("import sys; sys.exit(5)", 5),
    "a sentence": ("import sys; sys.exit('no use')", 1),
    "an error": ("def train():\n    raise ValueError('a bug')\ntrain()", 1),
    "a signal": ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
    "what is left to do": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "main = threading.current_thread()\n"
        "threading.Thread(target=lambda: (main.join(), print('a thread'))).start()",
        0,
    ),
}


async def _agent(stage: Stage, way: str, script: str, *arguments: str, nproc: int = 1) -> None:
    if way == "executed":
        package(stage.tmp / "packages", "threaded", THREADED + ADAPTOR, "tft.adaptors")
    adaptor = "staged" if way == "forked" else "threaded"
    await stage.agent(script, *arguments, nproc=nproc, adaptor=adaptor)


@pytest.mark.parametrize(
    ("way", "end"),
    [("forked", end) for end in ENDS]
    + [
        pytest.param("executed", end, marks=() if end == "a status" else pytest.mark.soak)
        for end in ENDS
    ],
)
async def test_rank_has_the_exit_status_and_output_of_python(
    stage: Stage, way: str, end: str
) -> None:
    """When a script ends in any way, then its exit status and last output are the same as with
    plain Python."""
    script, code = ENDS[end]
    await _agent(stage, way, script)
    await stage.start()
    exited = await stage.report(Exited)
    said = _log(stage, 0)

    assert exited.code == code, said
    assert _forked(stage) == (way == "forked")
    match end:
        case "a sentence":
            assert said == "no use\n"
        case "an error":
            assert said.startswith("Traceback (most recent call last):\n")
            assert 'script.py", line 2, in train' in said
            assert said.endswith("ValueError: a bug\n")
        case "what is left to do":
            assert said == "a thread\nat exit\n"
        case _:
            assert said == ""


@pytest.mark.soak
async def test_forked_and_executed_ranks_have_the_same_environment(stage: Stage) -> None:
    """When a rank is forked, then it has the same variables, signals and file descriptors as an
    executed rank, and leads its own session."""
    script = (
        "import json, os, signal, sys\n"
        "number = lambda name: int(os.environ.pop(name))\n"
        "own = [number('TFT_PAGE'), number('TFT_WORDS')]\n"
        "open_fds = [int(fd) for fd in os.listdir('/proc/self/fd')]\n"
        "files = [os.readlink(f'/proc/self/fd/{fd}') for fd in own]\n"
        "signals = [str(signal.getsignal(n)) for n in signal.valid_signals()]\n"
        "facts = dict(os.environ)\n"
        "rest = [os.getsid(0) == os.getpgid(0) == os.getpid(), sys.argv, sys.path[0], files,\n"
        "        sorted(set(open_fds) - set(own))[:3], os.stat(0).st_rdev, __name__,\n"
        "        str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signals,\n"
        "        sys.stdout.write_through, sys.stdout.seekable(), os.getppid(),\n"
        "        open('/proc/self/comm').read(), os.getcwd()]\n"
        "link = lambda fd: os.readlink(f'/proc/self/fd/{fd}')\n"
        "alive = [fd for fd in set(open_fds) - set(own)\n"
        "         if os.path.exists(f'/proc/self/fd/{fd}') and link(fd) not in files]\n"
        "print(json.dumps([facts, rest, sorted(alive)]))"
    )
    agent = await stage.agent(script, nproc=2, adaptor="staged")
    await stage.start(rank=0)
    await stage.report(Exited)
    server = _fork_server(stage)
    # a stopped fork server does not answer, so the agent starts the next rank itself
    os.kill(server, signal.SIGSTOP)
    await stage.start(rank=0, incarnation=1)
    await stage.report(Exited, incarnation=1)
    forked, executed = (json.loads(_log(stage, incarnation)) for incarnation in range(2))

    for facts in (forked[0], executed[0]):
        facts.pop("TFT_INCARNATION")
    assert forked == executed
    assert forked[1][0] is True
    assert forked[1][-3:-1] == [agent.pid, "tft-rank-0\n"]
    assert forked[2] == [0, 1, 2], "no descriptor of the fork server's"
    assert "fork_server_silent" in (stage.tmp / "err").read_text()


async def test_forked_ranks_draw_different_random_numbers(stage: Stage) -> None:
    """When two ranks are forked from the same process, then they draw different random numbers."""
    await _agent(
        stage,
        "forked",
        "import random, multiprocessing as m\nprint(random.random(), m.current_process().authkey)",
        nproc=2,
    )
    for rank in range(2):
        await stage.start(rank=rank)
    for rank in range(2):
        assert (await stage.report(Exited, rank=rank)).code == 0

    drawn = [set(_log(stage, 0, rank=rank).split(maxsplit=1)) for rank in range(2)]
    assert not drawn[0] & drawn[1]


async def test_killed_fork_server_is_replaced_and_its_ranks_live_on(stage: Stage) -> None:
    """When the fork server is killed, then its ranks continue, a new fork server starts, and the
    new one forks ranks."""
    await _agent(stage, "forked", PAGE + "say(1); signal.pause()", nproc=2)
    await stage.start(rank=0)
    await stage.said(1, rank=0)
    first = _fork_server(stage)
    os.kill(first, signal.SIGKILL)
    await gone(first)
    while (stage.tmp / "err").read_text().count("fork_server_ready") < 2:
        await stage.beat()
    assert _fork_server(stage) != first
    await stage.start(rank=1)
    await stage.said(1, rank=1)

    assert _forked(stage)
    assert not any(isinstance(report, Exited) for report in stage.reports)


async def test_adaptor_that_starts_threads_is_not_forked(stage: Stage) -> None:
    """When the import of the adaptor starts threads, then the agent logs this once and forks no
    rank."""
    await _agent(stage, "executed", "pass", nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.report(Exited, rank=rank)

    said = (stage.tmp / "err").read_text()
    assert said.count("ranks_not_forked") == 1
    assert "the process has 2 threads after the import of the adaptor 'threaded'" in said


@pytest.mark.parametrize("way", WAYS)
async def test_killed_store_is_opened_again(stage: Stage, way: str) -> None:
    """
    When the store is killed, then the next store is forked too, and imports the framework itself
    only if no process can be forked.
    """
    await _agent(stage, way, "pass")
    await stage.report(StoreOpened)
    first, heard = _store(stage), len(stage.reports)
    assert (b"tft.worker.fork_server" in command_line(first)) == (way == "forked")
    os.kill(first, signal.SIGKILL)
    await stage.report(StoreOpened, since=heard)

    assert _store(stage) != first
    module = b"tft.worker.fork_server" if way == "forked" else b"tft.worker.store"
    assert module in command_line(_store(stage))
    await stage.start()
    assert (await stage.report(Exited)).code == 0


@pytest.mark.soak
async def test_store_is_opened_when_the_fork_server_dies_first(stage: Stage) -> None:
    """
    When the fork server stops answering and the store is killed, then the store is opened by a
    process that imports the framework itself, or by one of the next fork server.
    """
    await stage.agent("pass")
    await stage.report(StoreOpened)
    server, heard = _fork_server(stage), len(stage.reports)
    os.kill(server, signal.SIGSTOP)
    os.kill(_store(stage), signal.SIGKILL)
    await stage.report(StoreOpened, since=heard)
    await stage.start()

    assert (await stage.report(Exited)).code == 0
    assert "fork_server_silent" in (stage.tmp / "err").read_text()


async def test_forked_ranks_die_with_their_agent(stage: Stage) -> None:
    """When the agent is killed, then the forked ranks and the fork server end, and no process
    remains."""
    agent = await stage.agent(PAGE + "say(1); signal.pause()", nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.said(1, rank=rank)
    assert _forked(stage)
    alive = stage.alive()
    agent.kill()
    agent.wait()
    await asyncio.gather(*map(gone, alive))

    assert stage.alive() == []


async def test_next_rank_is_a_process_that_was_forked_in_advance(stage: Stage) -> None:
    """When a rank trains, then one process is forked in advance. It becomes the next incarnation of
    the rank, and another one is forked when that trains."""
    agent, waiting = await _agent_with_waiting(stage)
    spawned = await _next_incarnation(stage)

    assert spawned.pid == waiting
    assert await _waiting(stage, agent.pid, 1) != waiting


async def test_process_that_was_forked_in_advance_and_killed_is_not_used(stage: Stage) -> None:
    """When the process that was forked in advance is killed, then another one is forked, which
    becomes the next incarnation of the rank."""
    _, waiting = await _agent_with_waiting(stage)
    os.kill(waiting, signal.SIGKILL)
    await gone(waiting)
    spawned = await _next_incarnation(stage)

    assert spawned.pid != waiting
    assert _forked(stage)
    assert "it has ended or was stopped" in (stage.tmp / "err").read_text()


@pytest.mark.soak
async def test_process_that_was_forked_in_advance_and_stopped_is_not_used(stage: Stage) -> None:
    """When the process that was forked in advance is stopped, then the agent kills it with one of
    its next beats, and another one becomes the next incarnation of the rank."""
    _, waiting = await _agent_with_waiting(stage)
    os.kill(waiting, signal.SIGSTOP)
    await gone(waiting)
    spawned = await _next_incarnation(stage)

    assert spawned.pid != waiting
    assert _forked(stage)


async def test_fork_server_that_cannot_fork_is_given_up(stage: Stage) -> None:
    """When every fork fails, for example because there are too many processes, then three fork
    servers in a row are tried, and the ranks are started without one."""
    package(stage.tmp / "packages", "unable", UNABLE + ADAPTOR, "tft.adaptors")
    err = stage.tmp / "err"
    await stage.agent("pass", adaptor="unable")
    await stage.report(StoreOpened)  # the first process that could not be forked
    for incarnation, servers in ((0, 2), (1, 3)):
        while err.read_text().count("fork_server_ready") < servers:
            await stage.beat()
        await stage.start(incarnation=incarnation)
        assert (await stage.report(Exited, incarnation=incarnation)).code == 0

    while "ranks_not_forked" not in err.read_text():
        await stage.beat()
    assert "the fork server ended 3 times in a row" in err.read_text()


async def test_no_process_forked_in_advance_outlives_the_job(stage: Stage) -> None:
    """When the job ends on the node, then the process that was forked in advance ends too."""
    agent, waiting = await _agent_with_waiting(stage)
    stage.order(EndNode(epoch=stage.epoch, why="test", grace=0.0))
    await gone(waiting)
    await gone(agent.pid)

    assert stage.alive() == []


async def test_orphans_of_a_rank_are_reaped(stage: Stage) -> None:
    """When a child process outlives its rank, then the agent adopts it, and no zombie process
    remains."""
    await _agent(
        stage,
        "forked",
        PAGE + "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid); os._exit(0)",
    )
    await stage.start()
    await stage.report(Exited)
    orphan = int(_log(stage, 0))
    await gone(orphan)
    while str(orphan) in os.listdir("/proc"):
        await stage.beat()


async def _agent_with_waiting(stage: Stage) -> tuple[subprocess.Popen[bytes], int]:
    """
    Start an agent and rank 0, which trains. Return the agent, and the pid of the process that was
    then forked in advance.
    """
    agent = await stage.agent(TRAINS)
    await stage.start()
    await stage.said(1)
    return agent, await _waiting(stage, agent.pid, 0)


async def _next_incarnation(stage: Stage) -> Spawned:
    """
    Order the next incarnation of rank 0, and return the report of its start when it trains.
    """
    await stage.start(incarnation=1)
    spawned = await stage.report(Spawned, incarnation=1)
    await stage.said(1)
    return spawned


async def _waiting(stage: Stage, agent: int, incarnation: int) -> int:
    """
    Wait until the agent has a process that was forked in advance while this incarnation of rank 0
    trains. Return the pid of that process.
    """
    while True:
        spawned = [report for report in stage.reports if isinstance(report, Spawned)]
        others = {_store(stage), *(report.pid for report in spawned)}
        forked = sorted(
            pid
            for pid in _watched(agent) - others
            if b"tft.worker.fork_server" in command_line(pid)
        )
        if len(forked) > 1 and any(report.incarnation == incarnation for report in spawned):
            return forked[1]  # the first is the fork server
        await stage.beat()


def _watched(agent: int) -> set[int]:
    """
    Return the processes to which the agent has a pidfd (a file descriptor for a process).
    """
    found: set[int] = set()
    for descriptor in Path(f"/proc/{agent}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # the agent has closed the descriptor meanwhile
            found.update(map(int, re.findall(r"(?m)^Pid:\t(\d+)$", descriptor.read_text())))
    return found


def _log(stage: Stage, incarnation: int, *, rank: int = 0) -> str:
    return (stage.run_dir / "logs" / f"rank-{rank}.{incarnation}.log").read_text()


def _forked(stage: Stage) -> bool:
    """
    Return whether all ranks that the agent has started so far were forked.
    """
    return "how=executed" not in (stage.tmp / "err").read_text()


def _fork_server(stage: Stage) -> int:
    """
    Return the pid of the fork server: the process with its command line that is neither a rank nor
    the store.
    """
    others = {report.pid for report in stage.reports if isinstance(report, Spawned)}
    others.add(_store(stage))
    [server] = [
        pid for pid in set(stage.alive()) - others if b"tft.worker.fork_server" in command_line(pid)
    ]
    return server


def _store(stage: Stage) -> int:
    return int((stage.run_dir / "pids" / "store-0.pid").read_text())
