"""
Known weaknesses of MindIO TFT, another fault-tolerance system, and the behaviour of tft in the same
cases.

`ROWS` lists every weakness that we know, by its number in our notes. Each entry names a test below
or in another file that shows the better behaviour.
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
    "9.1.1": "test_network_fault_does_not_hide_a_second_fault",
    "9.1.2": "test_rank_is_repaired_after_any_kind_of_fault_in_its_update",
    "9.1.3": "test_job_does_not_wait_for_a_step_that_only_the_lost_rank_had",
    "9.1.4": "test_copied_state_that_fails_verification_is_not_used",
    "9.1.5": "test_copies_are_taken_from_the_ranks_that_report_them",
    "9.1.6": "test_kept_copies_are_used_for_repairs_and_for_saves",
    "9.1.7": "test_lost_rank_removes_only_the_ranks_of_its_column",
    "9.1.8": "test_process_that_was_not_ordered_does_not_become_a_replacement",
    "9.1.9": "test_checkpoint_is_committed_only_with_all_its_files",
    "9.1.10": "tests/protocol/test_codec.py::test_invalid_frame_is_refused_with_the_reason",
    "9.2.11": "test_rank_0_is_recovered_like_any_other_rank",
    "9.2.12": "test_next_controller_continues_from_the_state_of_the_last_one",
    "9.2.13": "test_second_fault_at_any_moment_of_a_recovery_is_survived",
    "9.2.14": "test_hanging_training_thread_is_found_although_its_process_answers",
    "9.2.15": "test_each_order_has_its_own_deadline",
    "9.2.16": "test_failed_order_is_answered_before_its_deadline",
    "9.2.17": "test_request_to_end_does_not_wait_for_an_order_that_hangs",
    "9.2.18": "test_transition_table_covers_every_event_in_every_state",
    "9.2.19": "test_faults_are_handled_after_one_rank_has_finished",
    "9.2.20": "test_repeated_reports_count_once",
    "9.2.21": "test_round_numbers_may_exceed_sixteen_bits",
    "9.2.22": "test_rank_without_a_pending_answer_is_not_ended_by_elapsed_time",
    "9.2.23": "tests/protocol/test_codec.py::test_arbitrary_bytes_raise_only_malformed_message",
    "9.2.24": "test_state_survives_when_one_rank_cannot_leave_its_loop",
    "9.2.25": "tests/bus/test_zeromq.py::test_bus_reconnects_after_its_broker_was_killed",
    "9.2.26": "test_lost_store_is_replaced_by_the_store_of_another_node",
    "9.2.27": "test_other_strategies_stay_possible_after_a_failed_migration",
    "9.2.28": "test_next_incident_does_not_inherit_facts_of_the_last_one",
    "9.3.29": "test_requests_do_not_overwrite_each_other",
    "9.4.30": "test_copies_are_taken_from_the_ranks_that_report_them",
    "9.4.31": "test_job_without_copies_uses_its_last_checkpoint",
    "9.4.32": "test_rank_that_dies_before_the_first_step_is_replaced",
    "9.4.33": "test_a_lost_process_is_replaced_without_a_scheduler",
    "9.4.34": "test_job_grows_by_each_column_that_comes_back",
    "9.4.35": "test_request_to_end_is_obeyed_in_every_state",
    "9.5.36": "test_process_that_was_not_ordered_does_not_become_a_replacement",
    "9.5.37": "tests/bus/test_zeromq.py::test_stopped_process_is_gone_and_busy_process_stays_present",
    "9.5.38": "tests/mindio/test_tls.py::test_a_valid_certificate_is_accepted",
    "9.5.39": "tests/test_keys.py::test_unusable_keys_are_refused",
}
SHARDS = {"first": (0, 2), "second": (1, 3)}
TWO_NODES = {0: (0, 1), 1: (2, 3)}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def test_each_listed_weakness_names_a_test_that_exists() -> None:
    """When `ROWS` lists the 39 weaknesses, then each row names a test of this file, or a text that
    is in the named other file."""
    root = Path(__file__).parents[2]
    for where in ROWS.values():
        if "::" in where:
            file, text = where.split("::")
            assert text in (root / file).read_text(), where
        else:
            assert where in globals(), where
    listed = [int(row.rsplit(".", 1)[1]) for row in ROWS]
    assert listed == list(range(1, 40))


# ---------------------------------------------------------------- weaknesses of correctness


@pytest.mark.parametrize("first", [True, False], ids=["link first", "link last"])
def test_network_fault_does_not_hide_a_second_fault(first: bool) -> None:
    """The weakness: with one network fault among the faults, the state of all ranks was regarded as
    correct. When a link breaks and a rank also has a polluted state, a memory fault or a dead
    process, then the repair for that second fault is done."""
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
def test_rank_is_repaired_after_any_kind_of_fault_in_its_update(kind: FaultKind) -> None:
    """The weakness: only one kind of fault led to a repair, and after other kinds the job continued
    with a partly updated state. When a rank fails in the middle of its update, then the rank copies
    the state from another rank."""
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


def test_job_does_not_wait_for_a_step_that_only_the_lost_rank_had() -> None:
    """The weakness: the job had to continue from the highest step of all ranks, lost ranks
    included, and ended if a rank could not reach that step. When only the lost rank completed a
    step, then all ranks continue from the highest step of which every shard has a copy."""
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


def test_copied_state_that_fails_verification_is_not_used() -> None:
    """The weakness: copied state was verified only by its step number. When a copied state fails
    verification, then the state is copied again and training does not resume with it. After three
    failures the process is replaced."""
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


def test_copies_are_taken_from_the_ranks_that_report_them() -> None:
    """The weakness: the holders of a copy were computed from the group size, which was correct only
    for sizes that divide evenly. When five ranks hold three shards unevenly, then a replaced rank
    copies from exactly the ranks that report its shards. If no rank has a shard, the failure names
    this shard."""
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


def test_kept_copies_are_used_for_repairs_and_for_saves() -> None:
    """The weakness: the ranks had copies of the step before, but the controller ignored these
    copies. When all shards of a step are only available with a kept copy, then the controller uses
    this copy for a repair and for a save."""
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


def test_lost_rank_removes_only_the_ranks_of_its_column() -> None:
    """The weakness: the removal of ranks handled one kind of process group and ignored the other
    kinds. When a rank leaves, then only the ranks of its model replica leave too. All remaining
    ranks are told which ranks are missing."""
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


def test_process_that_was_not_ordered_does_not_become_a_replacement() -> None:
    """The weakness: a process that died and came back quickly was regarded as the same process.
    When a process claims a rank that another process holds, then it is refused. When the holder has
    died, then its end is an incident, even if another process claims the rank at once."""
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


def test_checkpoint_is_committed_only_with_all_its_files() -> None:
    """The weakness: one rank renamed a directory, and no process checked the files in it. When all
    ranks have saved, then the commit names every file with its size and digest. Before that there
    is no commit."""
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
        for name in (
            "first",
            "local-state-0",
            "local-state-1",
            "local-state-2",
            "local-state-3",
            "second",
        )
    ]


# ---------------------------------------------------------------- weaknesses of availability


@pytest.mark.parametrize("strategy", ["recover", "scale_in", "migrate"])
def test_rank_0_is_recovered_like_any_other_rank(strategy: str) -> None:
    """The weakness: rank 0 and its node could not be replaced, removed or migrated. When rank 0 is
    affected, then `recover`, `scale_in` and `migrate` work as for any other rank."""
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
def test_next_controller_continues_from_the_state_of_the_last_one(state: str) -> None:
    """The weakness: a controller that took over could only save and end. When another controller
    takes over in any state, then it repeats the unanswered orders in its own epoch. The job reaches
    the same result as without the change of controllers."""
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
    job._queue.clear()  # messages of the last leader that no rank has received
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
def test_second_fault_at_any_moment_of_a_recovery_is_survived(order: type[RankOrder]) -> None:
    """The weakness: a fault during a repair, or after the job had lost ranks, ended the job. When a
    survivor dies at any moment of a recovery, after an earlier `scale_in`, then both deaths are one
    incident and all ranks continue."""
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


def test_hanging_training_thread_is_found_although_its_process_answers() -> None:
    """The weakness: heartbeats came from a separate thread, and a hanging training thread was not
    noticed. When no rank makes progress and one rank does not wait for the others, then this rank
    is ended, its stacks are written, and it is replaced."""
    job = trained()
    job.ranks[2].loop.waiting = False
    job.stall()
    job.settle()
    job.train()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(2, True)]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("hang", 2)]
    assert "stuck.py" in incident["faults"][0]["evidence"]


def test_each_order_has_its_own_deadline() -> None:
    """The weakness: all orders had one limit, too short for a save and far too long for a freeze.
    When an order is not answered, then the controller acts after the limit of that order."""
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
def test_failed_order_is_answered_before_its_deadline(name: OrderName) -> None:
    """The weakness: several failures were not answered and cost a whole limit. When an order fails
    once, then the job is healthy again before any limit passes."""
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
def test_request_to_end_does_not_wait_for_an_order_that_hangs(name: OrderName) -> None:
    """The weakness: a rank handled one message after the other, and a request to end had to wait.
    When the end of the job is requested while an order hangs on every rank, then a new round begins
    at once."""
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


def test_transition_table_covers_every_event_in_every_state() -> None:
    """The weakness: an unexpected pair of state and result ended the controller without a message.
    When any event comes in any state, then the table has an entry for this pair."""
    reports = {kind.__name__ for kind in MESSAGES if kind in Report.__args__}
    verdicts = {"SlicesAgreed", "SlicesDiffered", "CorruptionTraced"}
    assert set(REACTIONS) == reports | verdicts | {"DeadlinePassed", "Stalled", "Led"}
    assert all(set(row) == set(State) for row in REACTIONS.values())


def test_faults_are_handled_after_one_rank_has_finished() -> None:
    """The weakness: faults were not handled any more after one rank had ended. When one rank has
    finished and another rank dies in its last step, then the dead rank is replaced and all ranks
    complete."""
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


def test_repeated_reports_count_once() -> None:
    """The weakness: one additional report made a counter miss the number that it waited for. When
    ranks, nodes and the rendezvous store repeat every report, then the repetitions cause no orders.
    The next death of a rank is recovered."""
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


def test_round_numbers_may_exceed_sixteen_bits() -> None:
    """The weakness: orders were numbered with sixteen bits, and after the last number no order was
    possible. When the job has more rounds than sixteen bits can count, then it continues."""
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


def test_rank_without_a_pending_answer_is_not_ended_by_elapsed_time() -> None:
    """The weakness: elapsed times were measured with the wall clock, and a change of that clock
    killed every rank. When a day passes between two events and no answer is pending, then no order
    is sent."""
    job = trained()
    assert job.machine.next_deadline() is None
    job.now += 86_400.0
    job.train()
    assert job.doing == "healthy"
    assert job.said == []


def test_state_survives_when_one_rank_cannot_leave_its_loop() -> None:
    """The weakness: nothing was saved if a device could not be stopped. When a rank cannot leave
    its loop, then the rank is ended. The other ranks save, or continue with a new process for it.
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


def test_lost_store_is_replaced_by_the_store_of_another_node() -> None:
    """The weakness: the address of a second rendezvous store was read incorrectly. When the node of
    the store is lost and another node has opened a store, then the process groups are formed at
    that second store."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, columns=COLUMNS)
    job.report(StoreOpened(node=1, host="other", port=7, at=job.now))
    job.lose_node(0)
    job.settle()
    assert [(r.host, r.port, r.to) for r in job.orders(Regroup)] == [("other", 7, (2, 3))]


def test_other_strategies_stay_possible_after_a_failed_migration() -> None:
    """The weakness: after a failed migration no other strategy could be chosen, not even a save.
    When a rank was migrated and its new processes die again and again, then `dump` is still offered
    and works."""
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


def test_next_incident_does_not_inherit_facts_of_the_last_one() -> None:
    """The weakness: facts about one fault were kept for the next fault. When an incident with a
    polluted state and a failed strategy is over, then the next incident starts without these facts.
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


def test_requests_do_not_overwrite_each_other() -> None:
    """The weakness: there was room for only one request, and the next request overwrote it. When a
    pause is requested in an incident, a second rank dies and advice comes late, then both ranks are
    recovered, and the job pauses after that."""
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


# ---------------------------------------------------------------- limits of what can be recovered


def test_job_without_copies_uses_its_last_checkpoint() -> None:
    """The limit: copies of the state on other ranks cost memory. When no rank has a copy of another
    rank's state, then a death costs the steps since the last checkpoint, and the job continues."""
    job = trained(groups={f"s{rank}": (rank,) for rank in range(4)})
    job.checkpointed(2)
    job.kill(0)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 3, 1)


@pytest.mark.parametrize("order", [Regroup, Rebuild, Rollback, Resume])
def test_rank_that_dies_before_the_first_step_is_replaced(order: type[RankOrder]) -> None:
    """The limit: a fault before the first step, or while groups were formed for the first time, was
    not handled. When a rank dies at any moment of the start, then the rank is replaced."""
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
    """The limit: only an external scheduler could order a new process. When there is no recovery
    plugin, then a lost process is replaced without advice."""
    job = trained()
    job.kill(1)
    job.settle()
    job.train()
    assert job.consulted == []
    assert strategies(job) == ["recover"]


def test_job_grows_by_each_column_that_comes_back() -> None:
    """The limit: after `scale_in` a job could only grow back to its first size, not to a size
    between. When two ranks have left and one comes back, then this rank is added. The other rank is
    added when it comes back."""
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
def test_request_to_end_is_obeyed_in_every_state(state: str) -> None:
    """The limit: a request to end was ignored, or ended the process without a save. When a request
    to end comes in any state, then a last checkpoint is written, and the ranks leave with exit code
    143."""
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
    if job.over is None:  # the job still waits for a process that starts
        job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.orders(Commit)) == 1
    assert {e.code for e in job.orders(End)} == {143}
