"""
Whom a recovery plugin has replaced: those it names, if what they hold is left on others.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill

HALVES = {"a": (0, 2), "b": (1, 3)}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
NINE = {"a": (1, 8), "b": (0, 2, 3, 4, 5, 6, 7)}


def test_advice_to_replace_both_holders_of_a_shard_is_not_followed() -> None:
    """When a plugin advises to replace the second of two ranks that hold a shard while the first is
    replaced too, then the advice is not followed. No sound copy would be left."""
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


def test_replaced_ranks_are_ended_in_rank_order_for_the_reason_of_the_plugin() -> None:
    """When a plugin advises to replace another rank in addition, then both processes are ended in
    rank order, with the plugin's reason."""
    job = trained(9, advised=True)
    job.fault(8, "network")
    job.settle()
    job.advise(strategy="fresh", base="recover", replace=(1,), why="their driver is old")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (1, "their driver is old"), (8, "their driver is old"),
    ]  # fmt: skip


def test_reason_of_the_plugin_is_the_cause_of_an_advised_replacement() -> None:
    """When a plugin advises `recover` before `retry` was tried, then the plugin's reason is the
    cause of the replacement. Without a reason, the cause is that a plugin advised it."""
    for why, cause in (("cards fail", "cards fail"), ("", "a recovery plugin has advised it")):
        job = trained(advised=True)
        job.fault(2, "memory")
        job.settle()
        job.advise(strategy="recover", why=why)
        assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [(2, cause)]


def test_veto_of_retry_is_the_cause_of_a_replacement() -> None:
    """When a plugin rules out `retry` and names no strategy, then the live process of the faulty
    rank is ended, and the veto is the cause."""
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(veto=("retry",), why="cards fail")
    assert [(kill.rank, kill.cause) for kill in job.orders(Kill)] == [
        (2, "no retry: a recovery plugin has ruled it out: cards fail")
    ]


def test_lost_rank_that_is_replaced_again_on_advice_is_one_fault() -> None:
    """When a plugin advises to replace a lost rank again, then the report has one fault for that
    rank, with both reasons."""
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


def test_advice_to_replace_a_rank_that_leaves_is_ignored() -> None:
    """When a plugin names a rank that leaves the job, or a rank that does not exist, then no
    process is replaced for that advice."""
    job = trained(advised=True, placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=COLUMNS)
    job.lose_node(2)
    job.settle()
    job.advise(strategy="smaller", base="scale_in", replace=(2, 77))
    job.settle()
    job.train()
    assert strategies(job) == ["smaller"]
    assert [kill.rank for kill in job.orders(Kill)] == [3]
    assert job.ranks[2].alive


def test_ranks_that_leave_do_not_prevent_an_advised_replacement() -> None:
    """When the ranks of a lost node leave the job, then the loss of their own state does not
    prevent an advised replacement of another rank."""
    job = trained(6, advised=True, derives=False, placement={0: (0, 1, 2, 3), 1: (4, 5)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="fresh", base="scale_in", replace=(0,))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["fresh"]
    assert [kill.rank for kill in job.orders(Kill) if kill.node == 0] == [0]


def test_ranks_to_replace_are_ignored_without_a_base_strategy() -> None:
    """When a plugin names a built-in strategy and ranks to replace, but no base, then no rank is
    replaced. The shards of these ranks are no reason against the strategy."""
    job = trained(advised=True, groups=HALVES)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="retry", replace=(0, 2))
    job.settle()
    job.train()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_dump_of_a_plugin_is_followed_when_the_ranks_cannot_train_on() -> None:
    """When a plugin advises its own strategy with base `dump` and the ranks cannot train on, then
    the advice is followed. The job ends with a last checkpoint."""
    job = trained(advised=True, derives=False, placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    job.advise(strategy="save_it", base="dump")
    job.settle()
    assert job.facts("advice_not_followed") == []
    assert strategies(job) == ["save_it"]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_report_says_exit_for_a_plugin_strategy_with_base_exit() -> None:
    """When a plugin ends the job with its own strategy of base `exit`, then the report names the
    strategy `exit`, not the plugin's name."""
    job = trained(advised=True)
    job.fault(2, "network")
    job.settle()
    job.advise(strategy="give_up", base="exit")
    job.settle()
    assert strategies(job) == ["exit"]
