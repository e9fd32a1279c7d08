"""
What another fault-tolerance system of this kind is known to get wrong, and what happens here.

`ROWS` names every weakness of MindIO TFT that is known to us, by its number in our notes: with the
test below that shows the better behaviour; or, where it is no matter of judgement, with the test
elsewhere that does, or the sentence that says what is not done here either.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.transitions import REACTIONS, State
from tft.protocol.messages import (
    MESSAGES,
    Commit,
    Complete,
    End,
    FaultKind,
    Fetch,
    Freeze,
    Joined,
    Kill,
    NodeJoined,
    OrderName,
    RankOrder,
    Rebuild,
    Refused,
    Regroup,
    Report,
    Restore,
    Resume,
    Rollback,
    Save,
    Spawn,
    Stop,
    StoreOpened,
)
from tft.testing.scripted import ScriptedJob

ROWS: dict[str, str] = {
    "9.1.1": "test_a_broken_link_beside_something_worse_hides_nothing",
    "9.1.2": "test_a_rank_that_failed_in_its_update_is_repaired_whatever_failed",
    "9.1.3": "test_a_step_that_only_the_lost_had_is_not_waited_for",
    "9.1.4": "test_what_does_not_verify_is_not_trained_on",
    "9.1.5": "test_copies_are_where_the_ranks_say_they_are",
    "9.1.6": "test_a_copy_that_is_kept_counts_in_every_decision",
    "9.1.7": "test_a_loss_takes_its_column_with_it_and_nobody_else",
    "9.1.8": "test_a_process_nobody_asked_for_is_no_replacement",
    "9.1.9": "test_a_checkpoint_is_committed_with_every_file_in_it_or_not_at_all",
    "9.1.10": "tests/protocol/test_codec.py::test_what_is_no_message_is_refused_with_a_sentence",
    "9.2.11": "test_no_rank_is_special",
    "9.2.12": "test_the_next_leader_goes_on_where_the_last_one_was",
    "9.2.13": "test_a_second_fault_is_survived_wherever_it_strikes",
    "9.2.14": "test_a_training_thread_that_hangs_is_found_though_its_process_answers",
    "9.2.15": "test_every_order_has_a_limit_of_its_own",
    "9.2.16": "test_an_order_that_fails_is_answered_not_waited_for",
    "9.2.17": "test_the_end_does_not_wait_for_what_is_under_way",
    "9.2.18": "test_there_is_no_event_that_a_state_has_no_answer_to",
    "9.2.19": "test_a_rank_that_has_finished_does_not_end_the_care_for_others",
    "9.2.20": "test_what_is_said_twice_counts_once",
    "9.2.21": "test_rounds_are_not_used_up",
    "9.2.22": "test_time_that_passes_kills_nobody_who_owes_nothing",
    "9.2.23": "tests/protocol/test_codec.py::test_no_bytes_whatever_raise_anything_else",
    "9.2.24": "test_a_loop_that_cannot_be_left_does_not_cost_the_state_of_the_others",
    "9.2.25": "tests/bus/test_zeromq.py::test_the_bus_works_again_by_itself_after_its_broker_was_killed",
    "9.2.26": "test_a_store_that_is_gone_is_opened_elsewhere",
    "9.2.27": "test_what_was_offered_first_is_not_all_there_is",
    "9.2.28": "test_what_was_held_against_one_incident_is_not_held_against_the_next",
    "9.3.29": "test_no_request_displaces_another",
    "9.4.30": "test_copies_are_where_the_ranks_say_they_are",
    "9.4.31": "test_a_job_without_copies_falls_back_to_its_checkpoints",
    "9.4.32": "test_a_rank_may_be_lost_before_the_first_step",
    "9.4.33": "test_a_lost_process_is_replaced_without_a_scheduler",
    "9.4.34": "test_a_job_grows_by_as_much_as_comes_back",
    "9.4.35": "test_a_request_to_end_is_heard_in_every_state",
    "9.5.36": "test_a_process_nobody_asked_for_is_no_replacement",
    "9.5.37": "tests/bus/test_zeromq.py::test_a_stopped_process_is_gone_and_comes_back_and_a_busy_one_stays",
    "9.5.38": "tests/mindio/test_tls.py::test_a_valid_certificate_is_accepted",
    "9.5.39": "tests/test_keys.py::test_keys_that_cannot_be_used_are_refused",
}
SHARDS = {"first": (0, 2), "second": (1, 3)}
TWO_NODES = {0: (0, 1), 1: (2, 3)}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def test_every_row_is_shown_here_or_says_where() -> None:
    """
    When a weakness is listed, then a test of that name is in this file, or what it points to is in
    the file that it names.
    """
    root = Path(__file__).parents[2]
    for where in ROWS.values():
        if "::" in where:
            file, text = where.split("::")
            assert text in (root / file).read_text(), where
        else:
            assert where in globals(), where
    listed = [int(row.rsplit(".", 1)[1]) for row in ROWS]
    assert listed == list(range(1, 40))


# ---------------------------------------------------------------- correctness


@pytest.mark.parametrize("first", [True, False], ids=["link first", "link last"])
def test_a_broken_link_beside_something_worse_hides_nothing(first: bool) -> None:
    """
    The weakness: with any network fault among the faults, state was taken to be sound. When a
    link breaks beside a pollution, a memory fault or a death, then what those need is done.
    """
    needs: list[tuple[Callable[[ScriptedJob], None], str]] = [
        (lambda job: job.fault(2, "numeric", polluted=True), "Restore"),
        (lambda job: job.fault(2, "memory"), "Fetch"),
        (lambda job: job.kill(2), "Fetch"),
    ]
    for strikes, need in needs:
        job = trained(keeps=1)
        if first:
            job.fault(0, "network")
        strikes(job)
        if not first:
            job.fault(0, "network")
        job.settle()
        job.train()
        assert need in [type(order).__name__ for order in job.said]
        assert job.doing == "healthy"


@pytest.mark.parametrize("kind", ["network", "numeric", "memory"])
def test_a_rank_that_failed_in_its_update_is_repaired_whatever_failed(kind: FaultKind) -> None:
    """
    The weakness: only one kind of fault led to a repair, and others went on with a torn state.
    When a rank fails in the middle of its update, then it copies the state from others.
    """
    job = trained(groups=SHARDS)
    for rank in range(4):
        job.window(rank)
    job.fault(2, kind)
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert (fetch.to, fetch.step) == ((2,), 4)
    assert [[s.rank for s in t.sources] for t in fetch.transfers] == [[0]]
    job.train()
    assert job.doing == "healthy"


def test_a_step_that_only_the_lost_had_is_not_waited_for() -> None:
    """
    The weakness: the step to go on from was the highest of all ranks, the lost ones among them,
    and where another could not reach it, the job ended. When that is so, then everyone goes on
    from the step that every shard has.
    """
    job = trained(groups=SHARDS)
    job.window(3)
    job.close(3)
    job.script.stuck = {0, 1, 2}
    job.kill(3)
    job.settle()
    job.script.stuck = set()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 4, 1)


def test_what_does_not_verify_is_not_trained_on() -> None:
    """
    The weakness: a step number was all that was compared. When what was copied does not verify,
    then nobody goes on with it: it is copied again, and after three times the process is replaced.
    """
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 3
    job.settle()
    job.wait()
    job.settle()
    assert [r.round for r in job.orders(Resume)] == [4]
    assert [f.round for f in job.orders(Fetch)] == [1, 2, 3, 4]
    job.train()
    assert strategies(job) == ["recover"]
    assert tried(job) == {"retry": "rank 1 could not fetch: digest differs"}


def test_copies_are_where_the_ranks_say_they_are() -> None:
    """
    The weakness: who has a copy was computed from the size of a group, and only sizes that divide
    evenly were right. When five ranks hold three shards as they please, then the lost one copies
    from exactly those who have what it had, and a shard that nobody else has is named.
    """
    groups = {"a": (0, 3), "b": (1, 3, 4), "c": (2, 4)}
    job = trained(5, groups=groups)
    job.kill(3)
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert {t.shard: {s.rank for s in t.sources} for t in fetch.transfers} == {
        "a": {0},
        "b": {1, 4},
    }
    lost = trained(5, groups=groups)
    lost.kill(2)
    lost.kill(4)
    lost.settle()
    assert lost.over is not None
    assert lost.over.result == "failed"
    assert "no sound copy of shard 'c' is left on ranks [2, 4]" in lost.over.why
    again = trained(5, groups=groups)
    for rank in (2, 4, 2):
        again.kill(rank)
        again.settle()
        again.train()
    assert strategies(again) == ["recover"] * 3


def test_a_copy_that_is_kept_counts_in_every_decision() -> None:
    """
    The weakness: copies of the step before were known to the ranks and ignored by the controller.
    When such a copy is what makes a step whole, then it is repaired from and saved from.
    """
    for enable in ("retry", "dump"):
        job = trained(groups=SHARDS, keeps=1, enable=frozenset({enable}))
        for rank in (0, 2):
            job.window(rank)
            job.close(rank)
        job.script.stuck = {1, 3}
        job.fault(1, "network")
        job.settle()
        assert {r.step for r in job.orders(Restore)} == {3}
        assert {r.step for r in job.orders(Rollback)} | {s.step for s in job.orders(Save)} == {3}
        assert bool(job.orders(Save)) == (enable == "dump")


def test_a_loss_takes_its_column_with_it_and_nobody_else() -> None:
    """
    The weakness: shrinking knew one kind of group and forgot the others. When a rank leaves, then
    those leave who name it, whatever they share; everyone who stays is told who is not there.
    """
    job = trained(
        6,
        placement={0: (0, 1, 2, 3), 1: (4,), 2: (5,)},
        columns={4: (4, 5), 5: (4, 5)},
        groups={"dense": (0, 2, 4), "expert": (1, 3, 5)},
    )
    job.lose_node(2)
    job.settle()
    (regroup,) = job.orders(Regroup)
    assert (regroup.to, regroup.without) == ((0, 1, 2, 3), (4, 5))
    assert job.ranks[4].alive


def test_a_process_nobody_asked_for_is_no_replacement() -> None:
    """
    The weakness: a process that died and came back quickly passed for the one before. When a
    process claims a rank that is held, then it is refused; when the one that held it has died,
    then its end is an incident, however quickly another comes.
    """
    job = trained()
    claim = Joined(
        rank=2, incarnation=0, world=4, pid=77, started=5, host="h", address="h:9", adaptor="fake",
        strategies=(), at=job.now,
    )  # fmt: skip
    job.report(claim)
    (refused,) = job.orders(Refused)
    assert (refused.rank, refused.pid) == (2, 77)
    assert job.doing == "healthy"
    job.kill(2)
    job.report(claim)
    assert len(job.orders(Refused)) == 2
    job.settle()
    job.train()
    assert [(s.rank, s.incarnation) for s in job.orders(Spawn)] == [(2, 1)]
    assert strategies(job) == ["recover"]


def test_a_checkpoint_is_committed_with_every_file_in_it_or_not_at_all() -> None:
    """
    The weakness: one rank renamed a directory, and nobody looked what was in it. When all have
    saved, then the commit names every file with its size and digest; before, there is none.
    """
    job = trained(groups=SHARDS)
    job.script.muted = {(3, "save")}
    job.stop(0)
    job.settle()
    assert job.orders(Commit) == []
    job.script.muted = set()
    job.repeat()
    job.settle()
    (commit,) = job.orders(Commit)
    assert [(f.name, f.size, f.digest) for f in commit.files] == [
        (name, 1, "d")
        for name in ("first", "private-0", "private-1", "private-2", "private-3", "second")
    ]


# ---------------------------------------------------------------- availability


@pytest.mark.parametrize("strategy", ["recover", "scale_in", "migrate"])
def test_no_rank_is_special(strategy: str) -> None:
    """
    The weakness: rank 0 and its node could not be replaced, left behind or taken over from. When
    it is rank 0, then it is done as for any other.
    """
    spare = {} if strategy == "scale_in" else {2: 2}
    job = trained(placement={**TWO_NODES, 2: ()}, columns=COLUMNS, groups=SHARDS, spare=spare)
    if strategy == "migrate":
        job.notice(0, "straggler")
    else:
        job.lose_node(0)
    job.settle()
    job.train()
    assert strategies(job) == [strategy]
    assert job.doing == "healthy"


@pytest.mark.parametrize(
    "state", ["freezing", "clearing", "choosing", "awaiting", "repairing", "rebuilding",
              "rolling back", "resuming", "pausing", "paused", "dumping", "exiting"],
)  # fmt: skip
def test_the_next_leader_goes_on_where_the_last_one_was(state: str) -> None:
    """
    The weakness: a controller that took over could do nothing but save and end. When another
    leads in any state, then what is unanswered is said again in its name, and the job comes to
    the same end as it would have.
    """
    job = trained(advised=True)
    job.script.slow = {1}
    if state in ("pausing", "paused"):
        job.pause()
    elif state in ("dumping", "exiting"):
        job.stop(0)
    else:
        job.kill(1)
    while job.doing != state:
        if job.doing == "choosing":
            job.advise()
        elif not job._queue:
            job.arrive(1)
        else:
            job._obey(job._queue.popleft())
    job._queue.clear()  # the last leader said it, and nobody heard
    job.lead(2)
    assert {order.epoch for order in job.machine.outstanding()} <= {2}
    for _ in range(9):
        job.repeat()
        job.settle()
        if job.doing == "choosing":
            job.advise()
        elif job.doing == "awaiting" and 1 in job.script.slow:
            job.arrive(1)
        elif job.doing == "paused":
            job.go_on()
        job.train()
    if state in ("dumping", "exiting"):
        assert job.over is not None
        assert (job.over.result, job.over.code) == ("dumped", 3)
    else:
        assert job.doing == "healthy"
        assert strategies(job) == ([] if state in ("pausing", "paused") else ["recover"])


@pytest.mark.parametrize("order", [Freeze, Stop, Regroup, Fetch, Rebuild, Rollback, Resume])
def test_a_second_fault_is_survived_wherever_it_strikes(order: type[RankOrder]) -> None:
    """
    The weakness: a fault during a repair, or while the job had shrunk, ended it. When a survivor
    dies at any moment of a recovery, in a job that has shrunk before, then it is one incident,
    and everyone goes on.
    """
    job = trained(5, placement={0: (0, 1, 2, 3), 1: (4,)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.said.clear()
    job.kill(1)
    while not job.orders(order):
        job._obey(job._queue.popleft())
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "recover"]
    assert {r.incarnation for r in job.ranks.values() if r.rank in (1, 2)} == {1}
    assert job.doing == "healthy"


def test_a_training_thread_that_hangs_is_found_though_its_process_answers() -> None:
    """
    The weakness: heartbeats came from a thread of their own, and a training thread that hung was
    never noticed. When nobody moves and one does not wait for the others, then that one is ended
    with its stacks written, and replaced.
    """
    job = trained()
    job.ranks[2].loop.waiting = False
    job.stall()
    job.settle()
    job.train()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(2, True)]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("hang", 2)]
    assert "stuck.py" in incident["faults"][0]["evidence"]


def test_every_order_has_a_limit_of_its_own() -> None:
    """
    The weakness: one limit for all, too short to save and far too long to freeze. When an order
    is not answered, then it is its own limit after which something is done about it.
    """
    limits: dict[OrderName, float] = {
        "freeze": 2.0, "stop": 10.0, "regroup": 60.0, "fetch": 300.0, "rebuild": 120.0,
        "rollback": 300.0, "resume": 60.0,
    }  # fmt: skip
    for name, limit in limits.items():
        job = trained()
        job.script.muted = {(r, name) for r in range(2)}
        job.fault(1, "memory")
        job.settle()
        began = job.now
        job.wait()
        assert job.now == pytest.approx(began + limit, abs=0.1), name
        assert job.facts("order_overdue")[0]["order"] == name
    last: dict[OrderName, float] = {"save": 1800.0, "commit": 1800.0}
    for name, limit in last.items():
        job = trained()
        job.script.muted = {(r, name) for r in range(4)}
        job.stop(0)
        job.settle()
        began = job.now
        job.wait()
        assert job.now == pytest.approx(began + limit, abs=0.1), name


@pytest.mark.parametrize(
    "name", ["freeze", "stop", "fetch", "regroup", "rebuild", "rollback", "resume"]
)
def test_an_order_that_fails_is_answered_not_waited_for(name: OrderName) -> None:
    """
    The weakness: several failures were not answered, and cost a whole limit. When an order fails
    once, then the job is healthy again without any limit passing.
    """
    job = trained()
    job.script.failures[1, name] = ["it broke"]
    began = job.now
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.now < began + 1.0
    assert job.facts("order_failed") == [{"rank": 1, "order": name, "why": "it broke"}]
    assert len(job.machine.incidents) == 1


@pytest.mark.parametrize("name", ["regroup", "fetch", "rebuild", "resume"])
def test_the_end_does_not_wait_for_what_is_under_way(name: OrderName) -> None:
    """
    The weakness: a rank carried out one message after the other, and an end could not overtake.
    When the end is asked for while an order hangs on every rank, then a new round begins at once.
    """
    job = trained()
    job.script.muted = {(r, name) for r in range(4)}
    job.fault(1, "memory")
    job.settle()
    before = len(job.orders(Freeze))
    job.stop(0)
    assert len(job.orders(Freeze)) == before + 1
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_there_is_no_event_that_a_state_has_no_answer_to() -> None:
    """
    The weakness: a pair of state and result that nobody had thought of ended the controller in
    silence. When anything happens in any state, then the table says what follows.
    """
    reports = {kind.__name__ for kind in MESSAGES if kind in Report.__args__}
    assert set(REACTIONS) == reports | {"DeadlinePassed", "Stalled", "Led"}
    assert all(set(row) == set(State) for row in REACTIONS.values())


def test_a_rank_that_has_finished_does_not_end_the_care_for_others() -> None:
    """
    The weakness: once any rank had ended, later faults were not dealt with. When one has finished
    and another dies in its last step, then that one is replaced, and all complete.
    """
    job = trained()
    job.window(0)
    job.close(0)
    job.finish(0)
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert [c.to for c in job.orders(Complete)] == [(0, 1, 2, 3)]


def test_what_is_said_twice_counts_once() -> None:
    """
    The weakness: a report more than expected, and a counter never came to its mark. When ranks,
    nodes and the store say everything twice, then nothing follows from it.
    """
    job = trained()
    for one in job.ranks.values():
        job.join(one)
        job.ready(one)
    job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0, 1, 2, 3), at=job.now))
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    assert job.said == []
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_rounds_are_not_used_up() -> None:
    """
    The weakness: orders were numbered in sixteen bits, and after so many nothing worked any more.
    When the job has come to more rounds than that, then it goes on.
    """
    job = trained(2)
    job.machine.incident.round = 70_000
    for _ in range(3):
        job.pause()
        job.settle()
        job.go_on()
        job.settle()
        job.train()
    assert job.doing == "healthy"
    assert job.machine.incident.round > 70_000


def test_time_that_passes_kills_nobody_who_owes_nothing() -> None:
    """
    The weakness: ages were told by the wall clock, and a clock that was set killed every rank.
    When a day passes between two events and nobody owes an answer, then nothing follows.
    """
    job = trained()
    assert job.machine.next_deadline() is None
    job.now += 86_400.0
    job.train()
    assert job.doing == "healthy"
    assert job.said == []


def test_a_loop_that_cannot_be_left_does_not_cost_the_state_of_the_others() -> None:
    """
    The weakness: where a device could not be stopped, nothing was saved. When a rank cannot leave
    its loop, then it is ended, and the others save, or go on with another process.
    """
    for enable, strategy in ((frozenset({"dump"}), "dump"), (frozenset({"recover"}), "recover")):
        job = trained(enable=enable)
        job.script.failures[2, "stop"] = ["the device does not answer"]
        job.fault(1, "network")
        job.settle()
        if job.over is None:
            job.train()
        assert strategies(job) == [strategy]
        assert [k.rank for k in job.orders(Kill)] == [2]
        assert [k.cause for k in job.orders(Kill)] == ["could not stop: the device does not answer"]


def test_a_store_that_is_gone_is_opened_elsewhere() -> None:
    """
    The weakness: the address of a second store was read wrongly. When the node of the rendezvous
    store is lost and another one opens, then the groups are formed there.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, columns=COLUMNS)
    job.report(StoreOpened(node=1, host="other", port=7, at=job.now))
    job.lose_node(0)
    job.settle()
    assert [(r.host, r.port, r.to) for r in job.orders(Regroup)] == [("other", 7, (2, 3))]


def test_what_was_offered_first_is_not_all_there_is() -> None:
    """
    The weakness: after a failed migration nothing else could be chosen, not even to save. When
    those who took over die again and again, then every other way is still open.
    """
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1}, respawns=1, advised=True)
    job.notice(3, "straggler")
    job.settle()
    job.advise(strategy="migrate")
    job.settle()
    job.kill(3)
    job.settle()
    job.advise()
    job.settle()
    job.kill(3)
    job.settle()
    possible = [o.strategy for o in job.consulted[-1].offers if o.why_not is None]
    assert "dump" in possible
    job.advise(strategy="dump")
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_what_was_held_against_one_incident_is_not_held_against_the_next() -> None:
    """
    The weakness: what was known of one fault stuck to the next. When an incident that polluted
    the state and used up a strategy is over, then the next one knows nothing of it.
    """
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.fault(2, "network")
    job.settle()
    job.train(2)
    job.fault(1, "memory")
    job.settle()
    job.train()
    last = job.machine.incidents[-1]
    assert (
        last.decision.strategy,
        last.spread.ceiling,
        last.decision.failed,
        last.exactness.skip,
    ) == (
        "retry",
        None,
        {},
        0,
    )
    assert [f.to for f in job.orders(Fetch)][-1] == (1,)
    assert job.reports()[-1]["steps_lost"] == 0


def test_no_request_displaces_another() -> None:
    """
    The weakness: what was asked for was kept in one place, and the next request overwrote it.
    When a pause is asked for in an incident, a second rank dies and advice comes late, then every
    one of them has its effect.
    """
    job = trained(advised=True)
    job.kill(1)
    job.settle()
    job.pause()
    job.kill(2)
    job.settle()
    job.advise(round=1, strategy="dump")
    job.advise()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {f["rank"] for f in job.reports()[0]["faults"]} == {1, 2}
    assert job.doing == "paused"


# ---------------------------------------------------------------- limits


def test_a_job_without_copies_falls_back_to_its_checkpoints() -> None:
    """
    The limit: redundancy costs memory. When no rank has a copy of another's state, then a death
    costs the steps since the last checkpoint, not the job.
    """
    job = trained(groups={f"s{rank}": (rank,) for rank in range(4)})
    job.checkpointed(2)
    job.kill(0)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 3, 1)


@pytest.mark.parametrize("order", [Regroup, Rebuild, Rollback, Resume])
def test_a_rank_may_be_lost_before_the_first_step(order: type[RankOrder]) -> None:
    """
    The limit: nothing was done about a fault before the first step, or while groups were formed
    for the first time. When a rank dies at any moment of the start, then it is replaced.
    """
    job = ScriptedJob(4)
    job.lead(1)
    job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0, 1, 2, 3), at=job.now))
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    while not job.orders(order):
        job._obey(job._queue.popleft())
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {r.step for r in job.ranks.values()} == {1}
    assert job.doing == "healthy"


def test_a_lost_process_is_replaced_without_a_scheduler() -> None:
    """
    The limit: only an external scheduler could have a process replaced. When nobody advises, then
    it is replaced all the same.
    """
    job = trained()
    job.kill(1)
    job.settle()
    job.train()
    assert job.consulted == []
    assert strategies(job) == ["recover"]


def test_a_job_grows_by_as_much_as_comes_back() -> None:
    """
    The limit: a job that had shrunk could only grow to its first size. When two columns have left
    and one comes back, then it is taken in, and the other when it comes.
    """
    job = trained(placement={0: (0, 1), 1: (2,), 2: (3,)})
    for node in (1, 2):
        job.lose_node(node)
        job.settle()
        job.train()
    assert job.machine.members == {0, 1}
    for node, members in ((2, {0, 1, 3}), (1, {0, 1, 2, 3})):
        job.come(node)
        job.settle()
        job.train()
        assert job.machine.members == members
    assert strategies(job) == ["scale_in", "scale_in", "scale_out", "scale_out"]


@pytest.mark.parametrize(
    "state", ["healthy", "freezing", "clearing", "choosing", "awaiting", "repairing", "rebuilding",
              "rolling back", "resuming", "pausing", "paused"],
)  # fmt: skip
def test_a_request_to_end_is_heard_in_every_state(state: str) -> None:
    """
    The limit: a request to end was ignored, or ended the process as it was. When it comes in any
    state, then a last checkpoint is written, and the ranks leave with the code that says so.
    """
    job = trained(advised=True)
    job.script.slow = {1}
    if state in ("pausing", "paused"):
        job.pause()
    elif state != "healthy":
        job.kill(1)
    while job.doing != state:
        if job.doing == "choosing":
            job.advise()
        elif not job._queue:
            job.arrive(1)
        else:
            job._obey(job._queue.popleft())
    job.stop()
    job.settle()
    if job.over is None:  # a process that was still starting
        job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.orders(Commit)) == 1
    assert {e.code for e in job.orders(End)} == {143}
