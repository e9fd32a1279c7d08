"""
Warm processes: they have run the script up to the point where it needs a rank, and wait there. The
next incarnation of a lost rank is one of them.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.agent.stage import ADAPTOR, PAGE, THREADED, Stage, command_line, gone, package
from tft.protocol.messages import EndNode, Exited, Spawned

NEEDS_A_RANK = """
from tft.worker import warm
if warm.is_warm():
    warm.wait_for_rank()
"""
"""The point of a script that the first use of the session is in a script of a user."""
TRAINS = NEEDS_A_RANK + PAGE + "page.train(True, time.monotonic()); say(1); signal.pause()"


async def _trains(stage: Stage, script: str, *, adaptor: str = "staged") -> None:
    """
    Start an agent with one warm process, and rank 0, which trains.
    """
    await stage.agent(script, warm_ranks=1, adaptor=adaptor)
    await stage.start()
    await stage.said(1)


async def _waiting(stage: Stage, count: int) -> list[int]:
    """
    Wait until `count` warm processes have waited for a rank, and return their pids in order.
    """
    while len(found := _logged(stage, "warm_process_waits")) < count:
        await stage.beat()
    return found


async def _next(stage: Stage, incarnation: int = 1) -> Spawned:
    """
    Order an incarnation of rank 0, and return the report of its start when it trains.
    """
    await stage.start(incarnation=incarnation)
    spawned = await stage.report(Spawned, incarnation=incarnation)
    await stage.pulse(lambda pulse: pulse.incarnation == incarnation and pulse.position.step == 1)
    return spawned


def _logged(stage: Stage, event: str) -> list[int]:
    said = (stage.tmp / "err").read_text()
    return [int(pid) for pid in re.findall(rf"event={event} .*\bpid=(\d+)", said)]


def lowest_nice() -> int:
    """
    Return the nice value that a process gets from `LowPriority` here.
    """
    ask = "import os; from tft.worker.priority import LowPriority as L; L()"
    done = subprocess.run(
        [sys.executable, "-c", f"{ask}; print(os.getpriority(os.PRIO_PROCESS, 0))"],
        stdout=subprocess.PIPE, check=True, text=True, start_new_session=True,
    )  # fmt: skip
    return int(done.stdout)


def _log(stage: Stage, name: str) -> str:
    return (stage.run_dir / "logs" / f"{name}.log").read_text()


@pytest.mark.parametrize("way", ["forked", "executed"])
async def test_next_incarnation_is_a_warm_process(stage: Stage, way: str) -> None:
    """When a rank is lost, then its next incarnation is the warm process, and another warm process
    is started when that trains."""
    if way == "executed":
        package(stage.tmp / "packages", "threaded", THREADED + ADAPTOR, "tft.adaptors")
    adaptor = "staged" if way == "forked" else "threaded"
    await _trains(stage, TRAINS, adaptor=adaptor)
    [first] = await _waiting(stage, 1)
    spawned = await _next(stage)
    _, second = await _waiting(stage, 2)

    assert spawned.pid == first
    assert (await _next(stage, 2)).pid == second
    assert (b"tft.worker.fork_server" in command_line(second)) == (way == "forked")


async def test_all_warm_processes_are_used(stage: Stage) -> None:
    """When there are two warm processes, then two ranks that are lost at once get them."""
    await stage.agent(TRAINS, warm_ranks=2, nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.said(1, rank=rank)
    warm = await _waiting(stage, 2)
    for rank in range(2):
        await stage.start(rank=rank, incarnation=1)
    spawned = [await stage.report(Spawned, rank=rank, incarnation=1) for rank in range(2)]

    assert {report.pid for report in spawned} == set(warm)


async def test_warm_process_keeps_what_the_script_did(stage: Stage) -> None:
    """When a warm process gets a rank, then the random seeds and the environment that the script
    has set are kept. It has the output, variables and priority of an ordinary rank, in each of its
    threads."""
    script = (
        "import json, os, random, threading\n"
        "import numpy\n"
        "random.seed(1); numpy.random.seed(1)\n"
        "os.environ['OWN'] = os.environ['OMP_NUM_THREADS'] = 'kept'\n"
        "del os.environ['PYTHONUNBUFFERED']\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "if 'TFT_INCARNATION' not in os.environ:\n"
        "    print('before', repr(os.environ['RANK']), os.environ['WORLD_SIZE'],"
        " os.getpriority(os.PRIO_PROCESS, 0))\n"
        + NEEDS_A_RANK
        + "facts = [random.random(), numpy.random.random(), os.environ['OWN'],\n"
        "    os.environ['RANK'], os.environ['TFT_INCARNATION'], 'TFT_PARENT' in os.environ,\n"
        "    os.environ['OMP_NUM_THREADS'], 'PYTHONUNBUFFERED' in os.environ,\n"
        "    open('/proc/self/autogroup').read().split()[-1],\n"
        "    [os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')]]\n"
        "print(json.dumps(facts))\n" + PAGE + "page.train(True, time.monotonic()); say(1)\n"
        "signal.pause()"
    )
    await _trains(stage, script)
    await _waiting(stage, 1)
    await _next(stage)
    [ordinary] = _log(stage, "rank-0.0").splitlines()
    [warm] = _log(stage, "rank-0.1").splitlines()
    expected = json.loads(ordinary)

    assert json.loads(warm) == [*expected[:4], "1", *expected[5:]]
    assert _log(stage, "warm-0.1") == f"before 'no-rank-yet' 1 {lowest_nice()}\n"


async def test_killed_warm_process_is_not_used(stage: Stage) -> None:
    """When a warm process is killed, then another one is started."""
    await _trains(stage, TRAINS)
    [first] = await _waiting(stage, 1)
    os.kill(first, signal.SIGKILL)
    _, second = await _waiting(stage, 2)

    assert (await _next(stage)).pid == second


@pytest.mark.soak
async def test_stopped_warm_process_is_not_used(stage: Stage) -> None:
    """When a warm process is stopped, then the agent kills it, and another one is started."""
    await _trains(stage, TRAINS)
    [first] = await _waiting(stage, 1)
    os.kill(first, signal.SIGSTOP)
    await gone(first)
    _, second = await _waiting(stage, 2)

    assert (await _next(stage)).pid == second


async def test_warm_process_that_still_runs_the_script_is_not_used(stage: Stage) -> None:
    """When a warm process has not come to the first use of the session, then a rank that is lost
    does not wait for it."""
    script = (
        "from tft.worker import warm\nimport time\n"
        "if warm.is_warm():\n    print('is slow'); time.sleep(3600)\n" + TRAINS
    )
    await _trains(stage, script)
    while not (path := stage.run_dir / "logs" / "warm-0.1.log").exists() or not path.read_text():
        await stage.beat()
    spawned = await _next(stage)

    assert spawned.pid not in _logged(stage, "warm_process_started")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("int(os.environ.get('RANK', 0))", "it ended with exit status 1 before the script used"),
        pytest.param(
            "raise SystemExit",
            "it ended with exit status 0 before the script used",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "os.kill(os.getpid(), 9)",
            "it ended with exit status -9 before the script used",
            marks=pytest.mark.soak,
        ),
    ],
)
async def test_script_that_cannot_run_without_a_rank(stage: Stage, end: str, said: str) -> None:
    """When a script fails or ends before it uses the session, as one that reads its rank from the
    environment, then the log says so. A lost rank is replaced without a warm process. The next warm
    process is started after a pause, which doubles each time."""
    script = f"import os\nfrom tft.worker import warm\nif warm.is_warm():\n    {end}\n"
    await _trains(stage, script + TRAINS)
    while (err := (stage.tmp / "err").read_text()).count("event=warm_process_lost") < 2:
        await stage.beat()
    spawned = await _next(stage)

    assert said in err
    assert f"{stage.run_dir}/logs/warm-0.2.log" in err
    assert re.findall(r"next_in=([\d.]+)", err) == ["1.0", "2.0"]
    assert spawned.pid not in _logged(stage, "warm_process_started")


async def test_warm_process_that_gets_its_rank_in_a_thread(stage: Stage) -> None:
    """When two threads use the session of a warm process, then both get the session of the rank."""
    script = (
        "import threading\n"
        "from tft.worker import warm\n"
        "class Session(warm.WarmSession): pass\n"
        "warm.Session = type('Ordinary', (), {'__init__': lambda self, told: None, 'rank': 7,\n"
        "    'open': lambda self, at: None})\n"
        "warm.rank_settings = lambda: None\n"
        "session = Session.__new__(Session)\n"
        "if not warm.is_warm():\n    object.__setattr__(session, '__class__', warm.Session)\n"
        "other = threading.Thread(target=lambda: print(f'other {session.rank}\\n', end=''))\n"
        "other.start()\nprint(f'main {session.rank}\\n', end='')\nother.join()\n"
    )
    await _trains(stage, script + PAGE + "page.train(True, time.monotonic()); say(1)\n"
                  "signal.pause()")  # fmt: skip
    await _waiting(stage, 1)
    await _next(stage)

    assert sorted(_log(stage, "rank-0.1").splitlines()) == ["main 7", "other 7"]


async def test_signal_handler_of_a_warm_process_that_uses_the_session(stage: Stage) -> None:
    """When a signal handler uses the session while the script already waits in it, then the process
    gets its rank, and both go on."""
    script = (
        "import signal\nfrom tft.worker import warm\n"
        "def handle(number, frame):\n    print('handler', flush=True)\n"
        "    if warm.is_warm():\n        warm.wait_for_rank()\n"
        "signal.signal(signal.SIGUSR1, handle)\n"
    )
    await _trains(stage, script + TRAINS)
    [warm] = await _waiting(stage, 1)
    os.kill(warm, signal.SIGUSR1)
    while not _log(stage, "warm-0.1"):
        await stage.beat()

    assert (await _next(stage)).pid == warm


async def test_child_of_a_warm_process_cannot_take_the_rank(stage: Stage) -> None:
    """When a child process of a warm process uses the session, then it gets an error, and the warm
    process gets the rank."""
    script = (
        "import os\nfrom tft.worker import warm\n"
        "if warm.is_warm() and os.fork() == 0:\n"
        "    try:\n        warm.wait_for_rank()\n"
        "    except Exception as error:\n        print(error, flush=True)\n"
        "    os._exit(0)\n"
    )
    await _trains(stage, script + TRAINS)
    [warm] = await _waiting(stage, 1)

    assert (await _next(stage)).pid == warm
    assert "use the session in the process of the script only" in _log(stage, "warm-0.1")


async def test_output_that_the_script_has_redirected_stays(stage: Stage) -> None:
    """When a script has redirected its output before it uses the session, then the output stays
    where it is."""
    own = stage.tmp / "own"
    script = (
        "import os\nfrom tft.worker import warm\n"
        f"if warm.is_warm():\n    os.dup2(os.open({str(own)!r}, os.O_CREAT | os.O_WRONLY), 1)\n"
        + NEEDS_A_RANK + "print('trains', flush=True)\n"
    )  # fmt: skip
    await _trains(stage, script + TRAINS)
    await _waiting(stage, 1)
    await _next(stage)

    assert own.read_text() == "trains\n"


async def test_warm_processes_of_a_node_without_ranks(stage: Stage) -> None:
    """When a node has only room for ranks of other nodes, then it keeps warm processes for them."""
    await stage.agent(TRAINS, warm_ranks=1, node=1, nnodes=1, spare=1)
    await _waiting(stage, 1)


async def test_no_warm_process_outlives_the_job(stage: Stage) -> None:
    """When the job ends on a node, then its warm processes end too."""
    agent = await stage.agent(TRAINS, warm_ranks=1)
    await stage.start()
    [first] = await _waiting(stage, 1)
    stage.order(EndNode(epoch=stage.epoch, why="test", grace=0.0))
    await gone(first)
    await gone(agent.pid)

    assert stage.alive() == []


async def test_warm_process_dies_with_its_agent(stage: Stage) -> None:
    """When the agent is killed, then its warm processes end too."""
    await _trains(stage, TRAINS)
    [first] = await _waiting(stage, 1)
    stage.kill_agent(0)
    await gone(first)


async def test_end_of_a_warm_process_with_a_rank_is_reported(stage: Stage) -> None:
    """When a process that was warm ends, then its end is reported as that of any rank."""
    await _trains(stage, TRAINS)
    await _waiting(stage, 1)
    spawned = await _next(stage)
    os.kill(spawned.pid, signal.SIGSEGV)
    exited = await stage.report(Exited, incarnation=1)

    assert exited.code == -signal.SIGSEGV
    assert "signal.pause" in exited.stack or "script.py" in exited.stack
