"""
The exchange of rank-local state between agents, over a real bus: two agents run, and the test is
the controller.
"""

from collections.abc import Callable

import pytest

from tests.agent.stage import PAGE, Stage
from tft.protocol.messages import Recall, Recalled, Spawned

CAPTURING = (
    PAGE
    + """
bell = int(os.environ["TFT_BELL"])
def capture(step, text, closed):
    page.capture(step, text, closed)
    os.write(bell, b"!")
"""
)
"""The beginning of scripts that capture their rank-local state and wake the agent."""


async def two_nodes(stage: Stage, script: str) -> None:
    """
    Start the agents of nodes 0 and 1, each with one rank, and rank 0. Node 1 keeps what node 0 has.
    """
    await stage.agent(script, nnodes=2)
    await stage.agent(script, nnodes=2, node=1)
    stage.kept_by = {0: 1, 1: 0}
    stage.lead()
    await stage.start(rank=0)


async def recalled(
    stage: Stage, where: Callable[[Recalled], bool], lost: int = 0, rank: int = 0
) -> Recalled:
    """
    Ask node 1 for what it has of a rank of node 0 until `where` is true for its report.
    """
    while True:
        known = len(stage.reports)
        stage.order(Recall(epoch=stage.epoch, node=1, lost=lost, ranks=(rank,)))
        report = await stage.report(Recalled, since=known, lost=lost, rank=rank)
        if where(report):
            return report
        await stage.beat()


async def test_captures_of_a_rank_are_kept_on_the_other_node(stage: Stage) -> None:
    """When a rank has captured its state, then the other node has it, the capture of the closed
    window before the open one. The rank's page says that it is there."""
    script = CAPTURING + (
        "page.forget_after(0, (2, 3)); page.opens(); say(6)\n"
        "page.capture(6, b'before', False); page.capture(6, b'six', True)\n"
        "capture(7, b'seven', False)\n"
        "late = -1\n"
        "while late != page.unprotected():\n"
        "    late = page.unprotected(); time.sleep(0.01); page.opens()\n"
        "say(7); signal.pause()"
    )
    await two_nodes(stage, script)
    await stage.said(7)
    report = await recalled(stage, lambda report: bool(report.local_state))
    assert report.local_state == {6: b"six".hex(), 7: b"seven".hex()}
    assert (report.node, report.incarnation, report.incident, report.round) == (1, 0, 2, 3)
    assert report.early == ()
    nothing = await recalled(stage, lambda _: True, rank=5)
    assert (nothing.incarnation, nothing.local_state) == (-1, {})


async def test_given_up_captures_are_forgotten_on_the_other_node(stage: Stage) -> None:
    """When a rank goes back to an earlier step, then the other node forgets the captures of later
    steps, although nothing new is captured."""
    script = CAPTURING + (
        "capture(4, b'four', True); capture(5, b'five', True)\n"
        "say(5)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "page.forget_after(4, (1, 1)); say(4); signal.pause()"
    )
    go = stage.tmp / "go"
    stage.arguments = (str(go),)
    await two_nodes(stage, script)
    await recalled(stage, lambda report: report.local_state.keys() == {4, 5})
    go.touch()
    report = await recalled(stage, lambda report: report.local_state.keys() == {4})
    assert (report.incident, report.round) == (1, 1)


async def test_state_from_before_the_end_of_a_window_is_marked(stage: Stage) -> None:
    """When the captures of a rank change after its all-reduces, then a capture from before the end
    of the window is reported as such."""
    script = CAPTURING + (
        "page.changes_late(3); page.opens(); say(2); capture(3, b'three', False); signal.pause()"
    )
    await two_nodes(stage, script)
    report = await recalled(stage, lambda report: bool(report.local_state))
    assert (report.local_state, report.early) == ({3: b"three".hex()}, (3,))


async def test_state_that_may_still_change_is_not_used(stage: Stage) -> None:
    """When a rank has captured a state that may still change before its all-reduces are complete,
    then the other node does not report it before the update window has opened."""
    script = CAPTURING + (
        "page.varies(); capture(2, b'two', True); capture(3, b'three', False); say(2)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "page.opens(); page.move(2, True, time.monotonic()); os.write(bell, b'!'); signal.pause()"
    )
    go = stage.tmp / "go"
    stage.arguments = (str(go),)
    await two_nodes(stage, script)
    await stage.said(2)
    report = await recalled(stage, lambda report: bool(report.local_state))
    assert report.local_state == {2: b"two".hex()}
    go.touch()
    await recalled(stage, lambda report: report.local_state.keys() == {2, 3})


async def test_another_keeper_gets_everything(stage: Stage) -> None:
    """When no node keeps the captures at first, then a node that is named later gets all of them,
    without a new capture."""
    script = CAPTURING + "capture(9, b'nine', True); say(9); signal.pause()"
    await stage.agent(script, nnodes=2)
    await stage.agent(script, nnodes=2, node=1)
    await stage.start(rank=0)
    await stage.said(9)
    nothing = await recalled(stage, lambda _: True)
    assert nothing.local_state == {}
    stage.kept_by = {0: 1, 1: 0}
    stage.lead()
    report = await recalled(stage, lambda report: bool(report.local_state))
    assert report.local_state == {9: b"nine".hex()}


@pytest.mark.soak
async def test_captures_stay_when_another_agent_has_come_up(stage: Stage) -> None:
    """When another agent has come up on a node, then the node that keeps its captures still has
    those of the earlier one, until the rank captures there again."""
    script = CAPTURING + "capture(1 + int(sys.argv[1]), b'x', True); say(1); signal.pause()"
    stage.arguments = ("1",)
    await two_nodes(stage, script)
    await recalled(stage, lambda report: report.local_state.keys() == {2})
    stage.kill_agent(0)
    stage.arguments = ("4",)
    await stage.agent(script, nnodes=2)
    stage.lead()
    report = await recalled(stage, lambda _: True)
    assert report.local_state.keys() == {2}
    await stage.start(rank=0, incarnation=1)
    report = await recalled(stage, lambda report: report.incarnation == 1)
    assert report.local_state.keys() == {5}


async def test_rank_of_a_job_with_one_node_has_no_bell(stage: Stage) -> None:
    """When a job has one node, then its ranks have nothing to wake the agent with."""
    await stage.agent(PAGE + "say(3 if os.environ['TFT_BELL'] == '' else 4); signal.pause()")
    await stage.start()
    await stage.report(Spawned)
    await stage.said(3)
