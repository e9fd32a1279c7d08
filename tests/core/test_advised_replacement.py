"""
Whom a recovery plugin has replaced: those it names, if what they hold is left on others.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill

HALVES = {"a": (0, 2), "b": (1, 3)}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
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


def test_who_is_replaced_on_advice_is_told_why_in_its_words() -> None:
    """
    When the ranks that are replaced anyway and another one are replaced on advice, then they are
    ended in their order, with the plugin's reason.
    """
    job = trained(9, advised=True)
    job.fault(8, "network")
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(1,), why="their driver is old")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (1, "their driver is old"), (8, "their driver is old"),
    ]  # fmt: skip


def test_who_is_replaced_because_it_was_advised_is_told_that() -> None:
    """
    When a plugin wants a process replaced before a retry was tried, then nobody says that a retry
    did not help; and where the plugin gives no reason, its advice is the reason.
    """
    for why, cause in (("cards fail", "cards fail"), ("", "a recovery plugin has advised it")):
        job = trained(advised=True)
        job.fault(2, "memory")
        job.settle()
        job.advise(strategy="recover", why=why)
        assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [(2, cause)]


def test_a_process_is_replaced_for_the_reason_against_a_retry() -> None:
    """
    When a retry is ruled out by a plugin that names no strategy, then that is why a process is
    ended that lives.
    """
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(veto=("retry",), why="cards fail")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (2, "no retry: a recovery plugin has ruled it out: cards fail")
    ]


def test_a_rank_that_is_replaced_once_more_on_advice_is_one_fault() -> None:
    """
    When a plugin has the new process of a lost rank replaced as well, then the report has its
    loss once, with both reasons.
    """
    job = trained(advised=True)
    job.kill(2)
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(2,), why="it has the wrong card")
    job.settle()
    if job.doing == "choosing":
        job.advise()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["evidence"]) for f in incident["faults"]] == [
        ("process", 2, "was ended by signal 9\nit has the wrong card")
    ]


def test_a_rank_that_has_left_is_not_replaced() -> None:
    """
    When a plugin has a rank replaced that takes no part any more, or none that there is, then it is
    left as it is.
    """
    job = trained(advised=True, placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=COLUMNS)
    job.lose_node(2)
    job.settle()
    job.advise(strategy="smaller", base="scale_in", replace=(2, 77))
    job.settle()
    job.train()
    assert strategies(job) == ["smaller"]
    assert [kill.rank for kill in job.orders(Kill)] == [3]
    assert job.ranks[2].alive


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
