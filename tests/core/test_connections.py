"""
A node whose connections to the bus have all ended at once is lost.
"""

from collections.abc import Callable

from tft.core.link.connections import FRESH, HURRIED, PATIENT, Connections

HOMES = {0: 0, 1: 0, 2: 1, 3: 1}
NODES = (0, 1)


def connected() -> Connections:
    """
    Return the connections of two nodes, each with a launcher, an agent and two ranks. The last
    heartbeats have arrived at time 10.
    """
    found = Connections(HOMES.get)
    for node in NODES:
        found.present(f"run.{node}/0")
        found.present(f"node.{node}/0")
        found.heard(node, 10.0)
    for rank in HOMES:
        found.present(f"rank.{rank}/0.{100 + rank}")
    return found


def leave(found: Connections, node: int, at: float, *, but: str = "") -> None:
    """
    End all connections of a node, except that of `but`.
    """
    ranks = [f"rank.{rank}/0.{100 + rank}" for rank, home in HOMES.items() if home == node]
    for sender in (f"run.{node}/0", f"node.{node}/0", *ranks):
        if sender != but:
            found.gone(sender, at)


def at_once(_: int) -> bool:
    """
    Say of every node that its ranks have room elsewhere, and are waited for.
    """
    return True


def lost(
    found: Connections, begin: float, end: float, hurried: Callable[[int], bool] = at_once
) -> dict[int, float]:
    """
    Look for lost nodes ten times a second. Return the time at which each was found.
    """
    times = [begin + number / 10 for number in range(round(10 * (end - begin)) + 1)]
    return {node: at for at in times for node in found.lost(at, hurried)}


def test_node_without_any_connection_is_lost_once() -> None:
    """When all connections of a node have been gone for a moment, and its ranks have room elsewhere,
    then the node is lost. It is returned once, and the other node is not."""
    found = connected()
    assert lost(found, 9.0, 10.0) == {}
    leave(found, 1, 10.1)
    assert lost(found, 10.1, 10.3) == {}
    assert found.lost(10.1 + HURRIED, at_once) == []
    assert found.lost(10.11 + HURRIED, at_once) == [1]
    assert lost(found, 10.4, 20.0) == {}


def test_node_that_nobody_replaces_has_more_time_to_come_back() -> None:
    """When the ranks of a node have no room elsewhere, then the node is lost only after the time in
    which its processes would have connected again."""
    found = connected()
    assert lost(found, 9.0, 10.0) == {}
    leave(found, 1, 10.1)
    (at,) = lost(found, 10.2, 20.0, lambda node: node != 1).values()
    assert PATIENT < at - 10.1 < PATIENT + 0.2


def test_controller_that_has_not_run_waits_for_what_it_has_not_read() -> None:
    """When the controller was blocked after the connections of a node have ended, then it waits once
    more: the processes may have connected again meanwhile."""
    found = connected()
    assert lost(found, 9.0, 10.1) == {}
    leave(found, 1, 10.1)
    assert found.lost(15.0, at_once) == []
    found.present("node.1/0")
    assert lost(found, 15.1, 20.0) == {}


def test_node_with_one_connection_is_not_lost() -> None:
    """When one process of a node is still connected, then the node is not lost."""
    for but in ("run.1/0", "node.1/0", "rank.3/0.103"):
        found = connected()
        leave(found, 1, 10.1, but=but)
        assert lost(found, 10.1, 20.0) == {}, but


def test_node_is_lost_when_its_last_connection_has_ended() -> None:
    """When the launcher of a node is gone after its agent and its ranks, then the node is lost."""
    found = connected()
    leave(found, 1, 10.1, but="run.1/0")
    assert lost(found, 10.1, 15.1) == {}
    found.gone("run.1/0", 15.1)
    (at,) = lost(found, 15.1, 20.0).values()
    assert HURRIED < at - 15.1 < HURRIED + 0.2


def test_process_of_another_node_does_not_count() -> None:
    """When a rank of a lost node has a process on another node, and that process is connected, then
    the node is lost all the same."""
    homes = {**HOMES, 3: 0}
    found = Connections(homes.get)
    for sender in ("node.0/0", "node.1/0", "rank.2/0.102", "rank.3/1.203"):
        found.present(sender)
    found.heard(1, 10.0)
    for sender in ("node.1/0", "rank.2/0.102"):
        found.gone(sender, 10.1)
    assert list(lost(found, 10.1, 11.0)) == [1]


def test_connection_that_comes_back_is_no_loss() -> None:
    """When the agent of a node connects again in time, then the node is not lost."""
    found = connected()
    leave(found, 1, 10.1)
    found.present("node.1/0")
    assert lost(found, 10.1, 20.0) == {}


def test_lost_broker_is_no_lost_node() -> None:
    """When all participants are gone together, then the broker is the cause. Nodes that connect again
    later than others are not lost."""
    found = connected()
    for node in NODES:
        leave(found, node, 10.1)
    found.present("node.0/0")
    assert lost(found, 10.1, 20.0) == {}


def test_node_that_was_silent_before_is_not_lost() -> None:
    """When the last heartbeat of a node is old at the end of its connections, then ZeroMQ has ended
    them, because the node did not answer. It may come back, so it is not lost yet."""
    found = connected()
    leave(found, 1, 10.0 + FRESH + 0.1)
    assert lost(found, 10.1, 20.0) == {}


def test_node_that_was_never_heard_is_not_lost() -> None:
    """When a node has sent no heartbeat, then the end of its connections is not its loss: its agent
    has not joined the job."""
    found = connected()
    found.present("node.2/0")
    found.gone("node.2/0", 10.1)
    assert lost(found, 10.1, 20.0) == {}


def test_end_of_an_agent_that_is_seen_late_says_nothing_about_its_successor() -> None:
    """When another agent of a node connects before the end of the earlier agent is seen, then the
    node is not lost. It is not lost either when it is cut off much later without having ended."""
    found = connected()
    found.present("node.1/3f9a2c51")
    leave(found, 1, 10.1)
    assert lost(found, 10.1, 20.0) == {}
    found.gone("node.1/3f9a2c51", 20.0)
    assert lost(found, 20.0, 30.0) == {}


def test_participants_without_a_node_say_nothing() -> None:
    """When a command of the operator, or a launcher without a node, connects or is gone, then no node
    is lost, and it does not stand for a node."""
    found = Connections(HOMES.get)
    found.present("node.1/0")
    found.heard(1, 10.0)
    for sender in ("ask.7", "run.-1/0", "controller/3", "node.x/0"):
        found.present(sender)
        found.gone(sender, 10.0)
    found.present("node.0/0")
    found.gone("node.1/0", 10.0)
    assert list(lost(found, 10.1, 20.0)) == [1]


def test_nodes_are_those_with_any_connection() -> None:
    """When one process of a node is connected, then the node is among the connected ones. A command
    of the operator and the launcher of `tft lead` belong to no node."""
    found = connected()
    leave(found, 0, 10.0, but="rank.1/0.101")
    assert found.nodes() == {0, 1}
    found.gone("rank.1/0.101", 10.0)
    leave(found, 1, 10.0)
    found.present("ask.status/0")
    found.present("run.-1/0")
    assert found.nodes() == set()
