"""
The agent and its orders: the processes that the agent starts, its reports, and its end.
"""

import json
import os
import signal
import time
from pathlib import Path

from tests.agent.stage import PAGE, PLUGIN, Stage, gone, package
from tft.agent.settings import AgentSettings, Placed, RankStart, rank_environment
from tft.config import JobSettings
from tft.protocol.messages import EndNode, Exited, Kill, NodeJoined, Spawned, StoreOpened

WAIT = PAGE + "say(1); signal.pause()"
"""The script of a rank that reports step 1 and then only waits."""


async def test_agent_joins_and_starts_only_ordered_ranks(stage: Stage) -> None:
    """When an agent starts, then it reports its ranks and its store. A rank has no process before
    `Spawn`."""
    agent = await stage.agent(WAIT, nproc=2)
    joined = await stage.report(NodeJoined)
    opened = await stage.report(StoreOpened)

    assert (joined.node, joined.ranks, joined.pid) == (0, (0, 1), agent.pid)
    assert (opened.host, opened.port > 0) == ("127.0.0.1", True)
    assert _pid(stage, "agent-0") == agent.pid
    assert len(stage.alive()) == 4, "the agent, its reaper, the store and the fork server"
    await stage.start(rank=1)
    spawned = await stage.report(Spawned)
    assert (spawned.rank, spawned.incarnation) == (1, 0)
    assert _pid(stage, "rank-1") == spawned.pid
    assert (await stage.pulse(lambda p: True)).rank == 1


async def test_rank_has_the_environment_variables_of_torchrun(stage: Stage) -> None:
    """When a rank starts, then its script sees the variables of torchrun and its own arguments."""
    await stage.agent(
        "import json, os, sys; from pathlib import Path\n"
        "print(json.dumps([dict(os.environ), sys.argv, sys.path[0], __name__, __file__]))",
        "--lr",
        "0.1",
        nproc=2,
    )
    opened = await stage.report(StoreOpened)
    await stage.start(rank=1, incarnation=4)
    assert (await stage.report(Exited)).code == 0
    script = str(stage.tmp / "script.py")
    environment, *python = json.loads((stage.run_dir / "logs" / "rank-1.4.log").read_text())

    assert python == [[script, "--lr", "0.1"], str(stage.tmp), "__main__", script]
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(opened.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TFT_INCARNATION": "4",
        "TFT_RUN_DIR": str(stage.run_dir),
    }
    assert {name: environment.get(name) for name in expected} == expected


def test_rank_keeps_the_place_that_another_launcher_gave_it(tmp_path: Path) -> None:
    """When another launcher gives the place of the only rank of a node, then the script of the rank
    sees this place."""
    job = JobSettings(job="j", run_dir=tmp_path, broker="h:1", nnodes=8)
    settings = AgentSettings(
        job=job, node=5, script="train.py", arguments=(), host="h", environment={},
        placed=Placed(local_rank=1, local_world=4, machine=2),
    )  # fmt: skip
    start = RankStart(
        rank=5, incarnation=0, successor=False, slot=0, page=3, words=4, store=("h", 1)
    )
    found = rank_environment(settings, "m", start)

    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    assert [found[name] for name in names] == ["5", "1", "4", "2", "2"]


async def test_end_of_a_rank_is_reported_at_once_with_its_page(stage: Stage) -> None:
    """When a rank is killed, then `Exited` comes within 0.1 seconds, with the position and the
    rank-local state of its page."""
    await stage.agent(
        PAGE + "page.capture(7, b'rng', True); page.move(7, True, 1.0); signal.pause()"
    )
    await stage.start()
    spawned = await stage.report(Spawned)
    await stage.said(7)
    killed = time.monotonic()
    os.kill(spawned.pid, signal.SIGKILL)
    exited = await stage.report(Exited)

    assert exited.code == -signal.SIGKILL
    assert (exited.position.step, exited.position.window) == (7, True)
    assert exited.local_state == {7: b"rng".hex()}
    assert exited.at - killed < 0.1  # it takes half a millisecond on an idle machine


async def test_next_incarnation_reads_the_page_of_the_last_one(stage: Stage) -> None:
    """When a rank is started again, then the new process reads the rank-local state that the process
    before has captured."""
    await stage.agent(
        PAGE + "print(page.local_states(), page.training())\n"
        "page.capture(3, b'state', True); page.train(True, 1.0)"
    )
    for incarnation in range(2):
        await stage.start(incarnation=incarnation)
        await stage.report(Exited, incarnation=incarnation)

    log = stage.run_dir / "logs" / "rank-0.1.log"
    assert log.read_text() == "{3: b'state'} False\n"


async def test_repeated_spawn_order_is_answered_and_starts_no_process(stage: Stage) -> None:
    """When `Spawn` is repeated, then the agent repeats the same `Spawned`. After the end of the
    process it also repeats `Exited`."""
    await stage.agent(WAIT)
    await stage.start()
    first = await stage.report(Spawned)
    await stage.said(1)
    await stage.start()
    assert await stage.report(Spawned, since=len(stage.reports)) == first

    os.kill(first.pid, signal.SIGKILL)
    exited = await stage.report(Exited)
    heard = len(stage.reports)
    await stage.start()
    assert await stage.report(Spawned, since=heard) == first
    assert await stage.report(Exited, since=heard) == exited


async def test_reports_are_repeated_until_they_are_acknowledged(stage: Stage) -> None:
    """When a report is not acknowledged, then the agent sends it again. After the acknowledgement
    the agent sends nothing again."""
    stage.acknowledging = False
    await stage.agent(WAIT)
    await stage.report(StoreOpened)
    while stage.numbers.count(1) < 3 or stage.numbers.count(2) < 3:
        await stage.beat()

    stage.acknowledging = True
    # wait for the acknowledgements, and for repetitions that were sent before they arrived
    for _ in range(2):
        await stage.beat()
    heard = len(stage.numbers)
    for _ in range(3):
        await stage.beat()
    assert len(stage.numbers) == heard


async def test_an_order_of_an_old_epoch_is_ignored(stage: Stage) -> None:
    """When a controller of an old epoch orders a kill or the end of the node, then the rank stays
    alive."""
    await stage.agent(WAIT)
    await stage.start()
    await stage.report(Spawned)
    await stage.said(1)
    stage.epoch = 5
    await stage.start()  # an answer proves that the agent knows the new epoch
    await stage.report(Spawned, since=len(stage.reports))
    stage.order(EndNode(epoch=4, grace=0.0, why="stale"))
    stage.order(_kill(epoch=4))
    stage.order(_kill(epoch=5, incarnation=-1))
    await stage.start()
    await stage.report(Spawned, since=len(stage.reports))

    assert not any(isinstance(report, Exited) for report in stage.reports)


async def test_newer_incarnation_ends_the_older_one_first(stage: Stage) -> None:
    """When a new incarnation of a rank is ordered while its process is alive, then the old process
    is killed before the new one starts."""
    await stage.agent(WAIT)
    await stage.start()
    await stage.said(1)
    await stage.start(incarnation=1)
    exited = await stage.report(Exited)
    spawned = await stage.report(Spawned, incarnation=1)

    assert (exited.incarnation, exited.code) == (0, -signal.SIGKILL)
    assert stage.reports.index(exited) < stage.reports.index(spawned)


async def test_end_that_was_ordered_is_reported_when_the_process_is_gone(stage: Stage) -> None:
    """When the controller has ordered the end of a process with much memory, then the end is not
    reported while the kernel still frees the memory: the controller must know if a process cannot
    be ended."""
    await stage.agent(
        PAGE + "memory = bytearray(b'1' * 2**29)\npage.live(); say(1); signal.pause()"
    )
    await stage.start()
    spawned = await stage.report(Spawned)
    await stage.said(1)
    stage.order(_kill())
    await stage.report(Exited)
    assert spawned.pid not in map(int, filter(str.isdecimal, os.listdir("/proc")))


async def test_kill_of_a_process_that_was_never_started_is_answered(stage: Stage) -> None:
    """When `Kill` names a process that was never started, then the agent reports `Exited`. A later
    `Spawn` of this process gets the same answer and starts nothing."""
    await stage.agent(WAIT)
    await stage.report(StoreOpened)
    stage.order(_kill(incarnation=2))
    exited = await stage.report(Exited)
    assert (exited.incarnation, exited.code) == (2, -signal.SIGKILL)

    await stage.start(incarnation=2)
    assert await stage.report(Exited, since=len(stage.reports)) == exited
    assert not any(isinstance(report, Spawned) for report in stage.reports)


async def test_node_that_counts_as_lost_joins_again_when_its_ranks_have_ended(stage: Stage) -> None:
    """When an agent hears that its node counts as lost, then it waits until its ranks have ended, and
    joins the job again."""
    await stage.agent(WAIT)
    await stage.report(NodeJoined)
    await stage.start()
    await stage.report(Spawned)
    stage.silent = (0,)
    stage.lead()
    await stage.pulse(lambda pulse: pulse.rank == 0)  # the agent has handled the message by now
    assert sum(isinstance(report, NodeJoined) for report in stage.reports) == 1
    heard = len(stage.reports)
    stage.order(_kill())
    await stage.report(NodeJoined, since=heard)
    kinds = [type(report) for report in stage.reports[heard:]]
    assert kinds.index(Exited) < kinds.index(NodeJoined)


async def test_a_rank_that_cannot_be_started_is_reported(stage: Stage) -> None:
    """When the process cannot be started, then `Exited` comes with status 127."""
    await stage.agent(WAIT)
    await stage.report(StoreOpened)
    # the start fails, because this directory has the path of the rank's log file
    (stage.run_dir / "logs" / "rank-0.0.log").mkdir()
    await stage.start()

    assert (await stage.report(Exited)).code == 127


async def test_a_lost_store_is_opened_again(stage: Stage) -> None:
    """When the store is killed, then a new store is reported, and ranks that start later find it."""
    await stage.agent("import os; print(os.environ['MASTER_PORT'])")
    await stage.report(StoreOpened)
    heard = len(stage.reports)
    pid = _pid(stage, "store-0")
    os.kill(pid, signal.SIGKILL)
    second = await stage.report(StoreOpened, since=heard)
    assert _pid(stage, "store-0") != pid
    await stage.start()
    await stage.report(Exited)

    log = stage.run_dir / "logs" / "rank-0.0.log"
    assert log.read_text() == f"{second.port}\n"


async def test_agent_ends_with_the_reason_when_its_store_cannot_open(stage: Stage) -> None:
    """When the store cannot open, then the agent ends with status 1 and prints the reason of the
    store."""
    agent = await stage.agent(WAIT, NO_STORE="1")
    await gone(agent.pid)

    assert agent.wait() == 1
    said = (stage.tmp / "err").read_text().splitlines()[-1]
    assert said.startswith("refused: the rendezvous store of adaptor 'staged' cannot be opened")
    assert "the door is locked" in said


async def test_plugins_are_told_of_the_first_step_and_may_fail(stage: Stage) -> None:
    """When the first rank completes a step, then plugins are told once. An error of a plugin does
    not end the agent."""
    package(stage.tmp / "packages", "observer", PLUGIN, "tft.plugins")
    await stage.agent(
        PAGE + "say(int(sys.argv[1]) + int(os.environ['RANK'])); signal.pause()", "4", nproc=2
    )
    await stage.start(rank=1)
    await stage.said(5, rank=1)
    await stage.start(rank=0)
    await stage.said(4, rank=0)

    assert (stage.run_dir / "progress-0").read_text() == "5\n"


async def test_no_process_remains_after_the_end_of_the_node(stage: Stage) -> None:
    """When `EndNode` comes, then ranks may exit by themselves during the grace time. Remaining
    processes are killed, and the agent exits with 0."""
    agent = await stage.agent(
        PAGE + "say(1)\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "say(2)\n"
        "signal.pause()",
        nproc=2,
    )
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.said(2, rank=rank)
    leaving = await stage.report(Spawned, rank=0)
    stage.order(EndNode(epoch=1, grace=0.3, why="done"))
    os.kill(leaving.pid, signal.SIGTERM)
    codes = {rank: (await stage.report(Exited, rank=rank)).code for rank in range(2)}
    await gone(agent.pid)

    assert codes == {0: 7, 1: -signal.SIGKILL}
    assert agent.wait() == 0
    assert stage.alive() == []


async def test_sigterm_ends_the_agent_and_all_its_processes(stage: Stage) -> None:
    """When the agent gets SIGTERM, then it exits with 143 within 2 seconds, and no process remains."""
    agent = await stage.agent(WAIT, nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
        await stage.said(1, rank=rank)
    agent.terminate()
    asked = time.monotonic()
    await gone(agent.pid)

    assert time.monotonic() - asked < 2.0
    assert agent.wait() == 143
    assert stage.alive() == []


def _kill(*, epoch: int = 1, incarnation: int = 0) -> Kill:
    return Kill(
        epoch=epoch, node=0, rank=0, incarnation=incarnation, last_words=False, cause="test"
    )


def _pid(stage: Stage, name: str) -> int:
    return int(Path(stage.run_dir / "pids" / f"{name}.pid").read_text())


async def test_agent_ends_when_another_run_leads_its_job(stage: Stage) -> None:
    """When a controller of another run leads a job of this name, though in an earlier epoch, then the
    agent ends with its ranks and says why: they must not train with the ranks of the other run."""
    agent = await stage.agent(WAIT)
    stage.run, stage.epoch = "first", 2
    await stage.report(NodeJoined)
    stage.lead()
    await stage.start()
    await stage.report(Spawned)
    stage.run, stage.epoch = "second", 1
    stage.lead()
    await gone(agent.pid)
    assert agent.wait() == 1
    said = (stage.tmp / "err").read_text().splitlines()[-1]
    assert said.startswith("refused: another run of the job 'job' has begun at")
    assert stage.alive() == []
