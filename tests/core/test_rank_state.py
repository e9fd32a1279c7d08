"""
The state of a rank, and of its processes one after the other.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.core.job.holdings import Holdings
from tft.core.job.rank_process import ProcessStage, RankProcess
from tft.core.job.rank_state import Declared, LocalState, RankState
from tft.core.plan.standing import Standing
from tft.protocol.messages import Joined, Position
from tft.testing.scripted import ScriptedJob


def test_a_rank_state_begins_empty() -> None:
    """
    When nobody was asked for yet, then a rank is at no address, holds nothing, and nothing is known
    against what it will hold.
    """
    job = ScriptedJob(2)
    assert [job.machine.incarnation(rank) for rank in (0, 1)] == [-1, -1]
    rank_state = RankState(rank=1)
    assert rank_state.standing("") == Standing(rank=1, alive=False)
    rank_state.process.stage, rank_state.holdings.backups = ProcessStage.READY, (0, 1)
    assert rank_state.able
    assert rank_state.holdings.kept == (0, 1)


def test_a_rank_of_which_nothing_was_heard_has_said_and_done_nothing() -> None:
    """
    When nobody was asked for yet, then a rank has no process that was started, is ended or is slow, its process has
    promised nothing, and no check has found anything.
    """
    rank_state = RankState(rank=1)
    process, declared = rank_state.process, rank_state.declared
    assert (process.pid, process.started, process.sender) == (0, 0, "")
    assert (process.spawned, process.began, process.terminating_since) == (0.0, 0.0, 0.0)
    assert (process.terminating, process.blame, process.straggles) == ("", "", "")
    assert (declared.derives, declared.reloads, declared.after) == (False, False, 0.0)
    assert (rank_state.check.verdict, rank_state.check.finding) == ("pass", "")


def test_the_next_process_begins_as_the_first_did() -> None:
    """
    When a process is asked for where another one has been, then nothing is left of that but what
    belongs to the rank, and what it may have captured before it ended.
    """
    rank_state = RankState(
        rank=1, node=2, excluded_nodes={0: 3}, declared=Declared(column=(1, 5)),
        local_state=LocalState(page=2, reported={7: "ab"}),
    )  # fmt: skip
    rank_state.order(0, 10.0)
    joined = Joined(
        rank=1, incarnation=0, world=8, pid=77, started=5, host="h", address="h:1", adaptor="fake",
        strategies=("retry",), derives=True, at=11.0,
    )  # fmt: skip
    rank_state.join(joined, "rank.1/0")
    rank_state.process.stage = ProcessStage.READY
    rank_state.holdings = Holdings(held=7, backups=(5, 6), trusted=False, damaged=True, doubted=4)
    rank_state.training = rank_state.finished = rank_state.repaired = True
    rank_state.process.invited = True
    rank_state.process.terminating = rank_state.process.blame = "hang"
    rank_state.failures.write = rank_state.failures.commit = "the disk is full"
    rank_state.position = Position(step=7, window=True)
    rank_state.order(1, 20.0)
    assert rank_state == RankState(
        rank=1,
        node=2,
        excluded_nodes={0: 3},
        process=RankProcess(incarnation=1, stage=ProcessStage.ORDERED, spawned=20.0, began=20.0),
        declared=Declared(
            column=(1, 5), address="h:1", strategies=frozenset({"retry"}), derives=True
        ),
        local_state=LocalState(page=2, reported={7: "ab"}),
    )


def test_who_is_told_to_end_is_neither_there_nor_coming() -> None:
    """
    When a process was told to end, then it takes part in nothing, however far it has come; the same
    goes for one that has ended.
    """
    for stage in ProcessStage:
        rank_state = RankState(rank=1, process=RankProcess(stage=stage))
        standing = rank_state.standing("no room")
        ready = stage is ProcessStage.READY
        starting = stage in (ProcessStage.ORDERED, ProcessStage.SPAWNED, ProcessStage.JOINED)
        assert (standing.alive, standing.coming) == (ready, starting)
        assert standing.unplaceable == "no room"
        assert rank_state.able is ready
        rank_state.process.terminating = "it hangs"
        standing = rank_state.standing("")
        assert (standing.alive, standing.coming, rank_state.able) == (False, False, False)


def test_copies_from_before_a_repair_are_not_kept() -> None:
    """
    When a memory was damaged, then nothing it keeps is trusted; after its repair what it has copied
    since is, and what is older is not.
    """
    for damaged, doubted, kept in ((True, -1, ()), (False, 4, (5,)), (False, -1, (3, 4, 5))):
        holdings = Holdings(backups=(3, 4, 5), damaged=damaged, doubted=doubted)
        assert holdings.kept == kept


def test_a_process_that_loads_a_checkpoint_has_no_copy_to_give() -> None:
    """
    When a process is loading a checkpoint, then neither its state in use nor an earlier copy counts.
    """
    holdings = Holdings(held=5, backups=(3, 4), searching=True)
    assert holdings.kept == ()
    assert not holdings.sound


def test_what_was_found_about_a_copy_does_not_outlive_it() -> None:
    """
    When a rank holds another copy than before, fetched or loaded, then what a comparison has found
    about the copy before is forgotten.
    """
    for fetched in (False, True):
        holdings = Holdings(held=5, outrun=frozenset({"a"}), disputed=True)
        holdings.replaced(fetched=fetched)
        assert holdings == Holdings(held=5, fetched=fetched)


def test_a_checkpoint_that_all_have_found_makes_the_memory_sound_again() -> None:
    """
    When all ranks have loaded the checkpoint of step 4, then nothing is known against the state of
    a rank. Of the copies that it keeps, only later ones than step 4 count.
    """
    holdings = Holdings(
        held=4, backups=(3, 4, 5), trusted=False, damaged=True, disputed=True,
        outrun=frozenset({"a"}),
    )  # fmt: skip
    holdings.reloaded(4)
    assert holdings == Holdings(held=4, backups=(3, 4, 5), doubted=4)
    assert holdings.sound
    assert holdings.kept == (5,)


@pytest.mark.parametrize("far", ["ordered", "spawned"])
def test_a_node_that_is_given_up_before_its_process_has_started_is_left(far: str) -> None:
    """
    When a node is found bad while a process starts there, or when its agent has not even said that
    it has started one, then the node is given up, and the rank comes back on another.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.slow = {3}
    if far == "ordered":
        job.script.gone = {1}  # its agent does not hear
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its power goes")
    job.script.slow = set()
    job.settle()
    if far == "ordered":
        job.wait()  # nobody says that its process has ended
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {one.node for one in job.ranks.values()} == {0, 2}
