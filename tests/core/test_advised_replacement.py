"""
Whom a recovery plugin has replaced: those it names, if what they hold is left on others.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill

HALVES = {"a": (0, 2), "b": (1, 3)}
NINE = {"a": (1, 8), "b": (0, 2, 3, 4, 5, 6, 7)}


def test_nobody_is_replaced_who_would_take_the_last_copy_along_with_another() -> None:
    """
    When a plugin has the one rank replaced that holds the same shard as the one that is replaced
    anyway, then its advice is not followed: between them they have all there is of it.
    """
    job = trained(9, advised=True, groups=NINE)
    job.fault(8, "network")
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(1,))
    assert job.facts("advice_not_followed")[0]["why_not"] == (
        "with ranks [1, 8] replaced, no sound copy of shard 'a' is left on ranks [1, 8]"
    )
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_those_who_leave_are_no_reason_against_a_replacement() -> None:
    """
    When what was a rank's own has gone with its node, and the rank leaves, then another one may be
    replaced on advice all the same.
    """
    job = trained(6, advised=True, derives=False, placement={0: (0, 1, 2, 3), 1: (4, 5)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="fresh", base="scale_in", replace=(0,))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["fresh"]
    assert [kill.rank for kill in job.orders(Kill) if kill.node == 0] == [0]


def test_only_a_strategy_of_its_own_replaces_anybody() -> None:
    """
    When a plugin names one of ours and ranks to be replaced, but no base, then nobody is replaced,
    and what they hold is no reason against it.
    """
    job = trained(advised=True, groups=HALVES)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="retry", replace=(0, 2))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_an_end_of_its_own_needs_no_step_to_go_on_from() -> None:
    """
    When a plugin brings a last checkpoint of its own, and nobody could train on, then it is
    written: nobody is replaced, and nobody goes on.
    """
    job = trained(advised=True, derives=False, placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="save_it", base="dump")
    job.settle()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["save_it"]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_an_end_without_a_checkpoint_is_one_whatever_it_is_called() -> None:
    """
    When a plugin has the job end under a name of its own, and nothing saved, then the report says
    that the job has left: the name is not one of a way that it went on.
    """
    job = trained(advised=True)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="give_up", base="exit")
    job.settle()
    assert strategies(job) == ["exit"]
