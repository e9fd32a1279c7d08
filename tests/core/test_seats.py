"""
A seat, and the processes that sit there one after the other.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.core.planner import Standing
from tft.core.seats import Process, Seat
from tft.protocol.messages import Joined, Position
from tft.testing.scripted import ScriptedJob


def test_a_seat_begins_empty() -> None:
    """
    When nobody was asked for yet, then a rank is at no address, holds nothing, and nothing is known
    against what it will hold.
    """
    job = ScriptedJob(2)
    assert [job.machine.incarnation(rank) for rank in (0, 1)] == [-1, -1]
    seat = Seat(rank=1)
    assert seat.standing("") == Standing(rank=1, alive=False)
    seat.process, seat.backups = Process.READY, (0, 1)
    assert seat.able
    assert seat.kept == (0, 1)


def test_the_next_process_begins_as_the_first_did() -> None:
    """
    When a process is asked for where another one has been, then nothing is left of that but what
    belongs to the rank, and what it may have captured before it ended.
    """
    seat = Seat(
        rank=1, node=2, private={7: "ab"}, page=2, excluded_nodes=frozenset({3}), column=(1, 5)
    )
    seat.order(0, 10.0)
    joined = Joined(
        rank=1, incarnation=0, world=8, pid=77, started=5, host="h", address="h:1", adaptor="fake",
        strategies=("retry",), derives=True, at=11.0,
    )  # fmt: skip
    seat.join(joined, "rank.1/0")
    seat.process = Process.READY
    seat.held, seat.backups = 7, (5, 6)
    seat.trusted, seat.damaged, seat.doubted = False, True, 4
    seat.training = seat.finished = seat.repaired = seat.invited = True
    seat.terminating = seat.blame = "hang"
    seat.unable = seat.no_commit = "the disk is full"
    seat.position = Position(step=7, window=True)
    seat.order(1, 20.0)
    assert seat == Seat(
        rank=1,
        node=2,
        incarnation=1,
        process=Process.ORDERED,
        spawned=20.0,
        began=20.0,
        private={7: "ab"},
        page=2,
        excluded_nodes=frozenset({3}),
        column=(1, 5),
        address="h:1",
        strategies=frozenset({"retry"}),
        derives=True,
    )


def test_who_is_told_to_end_is_neither_there_nor_coming() -> None:
    """
    When a process was told to end, then it takes part in nothing, however far it has come; the same
    goes for one that has ended.
    """
    for process in Process:
        seat = Seat(rank=1, process=process)
        standing = seat.standing("no room")
        ready = process is Process.READY
        starting = process in (Process.ORDERED, Process.SPAWNED, Process.JOINED)
        assert (standing.alive, standing.coming) == (ready, starting)
        assert standing.unplaceable == "no room"
        assert seat.able is ready
        seat.terminating = "it hangs"
        standing = seat.standing("")
        assert (standing.alive, standing.coming, seat.able) == (False, False, False)


def test_copies_from_before_a_repair_are_not_kept() -> None:
    """
    When a memory was damaged, then nothing it keeps is trusted; after its repair what it has copied
    since is, and what is older is not.
    """
    for damaged, doubted, kept in ((True, -1, ()), (False, 4, (5,)), (False, -1, (3, 4, 5))):
        seat = Seat(rank=1, backups=(3, 4, 5), damaged=damaged, doubted=doubted)
        assert seat.kept == kept


@pytest.mark.parametrize("far", ["ordered", "spawned"])
def test_a_node_that_is_given_up_before_its_process_has_started_is_left(far: str) -> None:
    """
    When a node is found bad while a process starts there, or when its agent has not even said that
    it has started one, then the node is given up, and the rank comes back on another.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.slow = {3}
    if far == "ordered":
        job.gone = {1}  # its agent does not hear
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its power goes")
    job.slow = set()
    job.settle()
    if far == "ordered":
        job.wait()  # nobody says that its process has ended
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {one.node for one in job.ranks.values()} == {0, 2}
