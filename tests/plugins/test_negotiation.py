"""
An external scheduler that negotiates every recovery, dialogue by dialogue.
"""

from typing import Any

import pytest
from mindio_ttp.negotiator import MEMORY, NETWORK, PROCESS, Negotiator, Ranks
from structlog.testing import capture_logs

from tests.plugins.negotiation import Negotiation
from tft.protocol.messages import Fetch, Kill, Save, Spawn

TWO_NODES = {0: (0, 1), 1: (2, 3)}
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
ALL_LIVE = ["exit", "dump", "retry", "recover"]
"""What is offered where every process lives; the last is the best."""


def agreeable(choice: str, **facts: Any) -> Negotiation:  # Any: as in `trained`
    """
    An orchestrator that sees what the job sees, and always chooses this.
    """
    talk = Negotiation(**facts)
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.on("strategies", lambda us: us.change_strategy(choice))
    return talk


def codes(faults: Ranks) -> dict[int, str]:
    """
    The codes of devices, which have said none.
    """
    return dict.fromkeys(faults, "")


def strategies(talk: Negotiation) -> list[str]:
    """
    What was done about each incident that is over.
    """
    return [incident.decision.strategy for incident in talk.job.machine.incidents]


# ---------------------------------------------------------------- retry and recover


def test_a_memory_fault_is_negotiated_and_retried() -> None:
    """
    When a rank's memory fails, then the scheduler hears who, that all have stopped, what can be
    done; it chooses; and after one more step of everyone it hears that it has worked.
    """
    talk = agreeable("retry")
    talk.job.fault(2, "memory")
    talk.settle()
    faults = {2: MEMORY}
    assert talk.news() == [
        ("fault_ranks", faults, codes(faults)),
        ("stop_complete", 0, "", faults),
        ("strategies", faults, ALL_LIVE),
    ]
    talk.train()
    assert talk.news() == [("result", 0, "ok", faults, "retry")]
    assert strategies(talk) == ["retry"]
    assert talk.job.doing == "healthy"


def test_a_broken_link_is_a_type_of_its_own() -> None:
    """
    When a connection breaks, then the scheduler hears that it is the network.
    """
    talk = agreeable("retry")
    talk.job.fault(1, "network")
    talk.settle()
    talk.train()
    assert talk.news()[0] == ("fault_ranks", {1: NETWORK}, codes({1: NETWORK}))
    assert strategies(talk) == ["retry"]


def test_the_clusters_own_view_joins_the_incident() -> None:
    """
    When a process dies and the cluster knows that its node's other process is as good as lost,
    then that one is ended too, both are replaced, and the scheduler hears of both.
    """
    talk = Negotiation(placement=TWO_NODES)
    talk.on("stop_complete", lambda us: us.on_global_rank({2: PROCESS, 3: PROCESS}))
    talk.on("strategies", lambda us: us.change_strategy("recover"))
    talk.job.kill(2)
    talk.settle()
    both = {2: PROCESS, 3: PROCESS}
    assert talk.news() == [
        ("fault_ranks", {2: PROCESS}, codes({2: PROCESS})),
        ("stop_complete", 0, "", {2: PROCESS}),
        ("fault_ranks", both, codes(both)),
        ("strategies", both, ["exit", "dump", "recover", "downgrade"]),
    ]
    talk.train()
    assert talk.news() == [("result", 0, "ok", both, "recover")]
    assert [k.rank for k in talk.job.orders(Kill)] == [3]
    assert [s.rank for s in talk.job.orders(Spawn) if s.incarnation] == [2, 3]
    assert {f.to for f in talk.job.orders(Fetch)} == {(2,), (3,)}


def test_the_cluster_may_see_a_fault_first() -> None:
    """
    When the scheduler stops the training for a fault that the job has not seen, then it is an
    incident like any other.
    """
    talk = agreeable("recover")
    talk.negotiator.stop_train({3: PROCESS})
    talk.settle()
    talk.train()
    assert [said[0] for said in talk.news()] == [
        "fault_ranks", "stop_complete", "strategies", "result",
    ]  # fmt: skip
    assert [k.cause for k in talk.job.orders(Kill)] == ["the cluster reports it"]
    assert strategies(talk) == ["recover"]


def test_a_retry_that_does_not_help_is_followed_by_what_is_chosen_next() -> None:
    """
    When the fault comes back after a retry, then the scheduler hears that replacing is still
    possible (405), reads the new list, and chooses again.
    """
    talk = agreeable("retry")
    talk.job.fault(2, "memory")
    talk.settle()
    talk.on("strategies", lambda us: us.change_strategy("recover"))
    talk.job.fault(2, "memory")
    talk.settle()
    talk.train()
    faults = {2: MEMORY}
    assert talk.news()[3:] == [
        ("result", 405, "it did not help", faults, "retry"),
        ("strategies", faults, ["exit", "dump", "recover"]),
        ("result", 0, "ok", faults, "recover"),
    ]
    assert strategies(talk) == ["recover"]


def test_a_replacement_that_does_not_help_can_be_dumped() -> None:
    """
    When the new process dies again and again, then the scheduler hears that saving is still
    possible (406), has it saved, and hears that it was.
    """
    talk = agreeable("recover", respawns=1)
    talk.job.kill(1)
    talk.settle()
    assert talk.news()[-1][0] == "strategies"
    talk.on("strategies", lambda us: us.change_strategy("dump"))
    talk.job.kill(1)
    talk.settle()
    failed, offered, ended = talk.news()
    assert failed == ("result", 406, "it did not help", {1: PROCESS}, "recover")
    assert offered == ("strategies", {1: PROCESS}, ["exit", "dump", "downgrade"])
    assert ended[:2] == ("result", 0)
    assert ended[-1] == "dump"
    assert talk.job.over is not None
    assert (talk.job.over.result, talk.job.over.code) == ("dumped", 3)


def test_where_nothing_is_left_the_end_is_all_that_is_offered() -> None:
    """
    When the only holder of a shard dies, then the scheduler hears that nothing is there to go on
    with (404), the one thing it can choose, and that the job has failed (499).
    """
    talk = agreeable("exit", groups={"a": (0, 1), "b": (2,), "c": (3,)})
    talk.job.kill(3)
    talk.settle()
    faults = {3: PROCESS}
    assert talk.news()[:3] == [
        ("fault_ranks", faults, codes(faults)),
        ("stop_complete", 404, "", faults),
        ("strategies", faults, ["exit"]),
    ]
    assert talk.job.over is not None
    assert (talk.job.over.result, talk.job.over.code) == ("failed", 4)


def test_a_strategy_that_was_not_offered_ends_the_dialogue() -> None:
    """
    When the scheduler chooses what it was not offered, then it hears so (499), and the job ends.
    """
    talk = agreeable("upgrade")
    talk.job.fault(2, "memory")
    talk.settle()
    assert talk.news()[3] == ("result", 499, "upgrade was not offered", {2: MEMORY}, "upgrade")
    assert talk.job.over is not None
    assert talk.job.over.result == "failed"
    assert talk.job.orders(Save) == []


# ---------------------------------------------------------------- down and up


def test_a_job_is_downgraded_and_upgraded_by_choice() -> None:
    """
    When a node is lost and the scheduler has the job go on without its ranks, then it hears which
    those are (201), and that it has worked; when the node is back, it is asked whether they are
    to come back, and hears that they have.
    """
    talk = agreeable("downgrade", placement=TWO_NODES, columns=COLUMNS)
    talk.job.lose_node(1)
    talk.settle()
    gone = {2: PROCESS, 3: PROCESS}
    assert talk.news() == [
        ("fault_ranks", gone, codes(gone)),
        ("stop_complete", 0, "", gone),
        ("strategies", gone, ["exit", "dump", "downgrade"]),
        ("result", 201, "", gone, "downgrade"),
    ]
    talk.train()
    assert talk.news() == [("result", 0, "ok", gone, "downgrade")]
    assert talk.job.machine.members == {0, 1}

    talk.on("strategies", lambda us: us.change_strategy("upgrade"))
    talk.job.come(1)
    talk.settle()
    assert talk.news() == [
        ("fault_ranks", {}, codes({})),
        ("stop_complete", 0, "", {}),
        ("strategies", {}, ["exit", "dump", "retry", "upgrade"]),
    ]
    talk.train()
    assert talk.news() == [("result", 0, "ok", {}, "upgrade")]
    assert strategies(talk) == ["scale_in", "scale_out"]
    assert talk.job.machine.members == {0, 1, 2, 3}


def test_an_upgrade_may_be_said_before_anybody_is_back() -> None:
    """
    When the scheduler says `upgrade` while the job goes on with fewer ranks, then they come back when they are
    ready, and it is not asked again; before a downgrade that word is nothing.
    """
    talk = agreeable("downgrade", placement=TWO_NODES, columns=COLUMNS)
    talk.negotiator.change_strategy("upgrade")
    assert not talk.negotiator.growing
    talk.job.lose_node(1)
    talk.settle()
    talk.train()
    talk.news()
    talk.negotiator.change_strategy("upgrade")
    talk.job.come(1)
    talk.settle()
    talk.train()
    assert talk.news() == [("result", 0, "ok", {}, "upgrade")]
    assert strategies(talk) == ["scale_in", "scale_out"]
    assert not talk.negotiator.fewer
    assert not talk.negotiator.growing


def test_those_who_have_to_leave_with_the_lost_are_named() -> None:
    """
    When one rank is lost and its column leaves, then the scheduler hears of both ranks.
    """
    talk = agreeable("downgrade", placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=COLUMNS)
    talk.job.lose_node(2)
    talk.settle()
    assert ("result", 201, "", {2: PROCESS, 3: PROCESS}, "downgrade") in talk.news()


# ---------------------------------------------------------------- time


def test_a_scheduler_may_take_its_time_over_the_clusters_view() -> None:
    """
    When the scheduler first has to look at its cluster, then everyone waits, and the dialogue
    goes on when it has.
    """
    talk = Negotiation()
    talk.on("strategies", lambda us: us.change_strategy("retry"))
    talk.job.fault(2, "memory")
    talk.settle()
    assert [said[0] for said in talk.news()] == ["fault_ranks", "stop_complete"]
    assert talk.job.doing == "choosing"
    talk.wait()
    assert talk.news() == []
    talk.negotiator.on_global_rank({2: MEMORY})
    talk.wait()
    talk.train()
    assert [said[0] for said in talk.news()] == ["strategies", "result"]
    assert strategies(talk) == ["retry"]


def test_a_scheduler_may_wait_for_a_new_node() -> None:
    """
    When a node is lost and the scheduler is getting another, then everyone waits for its choice;
    once the node is there, recovering is offered.
    """
    talk = Negotiation(placement=TWO_NODES, columns=COLUMNS)
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.job.lose_node(1)
    talk.settle()
    assert talk.news()[-1] == ("strategies", {2: PROCESS, 3: PROCESS}, [
        "exit", "dump", "downgrade",
    ])  # fmt: skip
    talk.job.spare[5] = 2
    talk.job.come(5)
    talk.settle()
    talk.on("strategies", lambda us: us.change_strategy("recover"))
    talk.wait()
    talk.train()
    gone = {2: PROCESS, 3: PROCESS}
    assert talk.news() == [
        ("strategies", gone, ["exit", "dump", "recover", "downgrade"]),
        ("result", 0, "ok", gone, "recover"),
    ]
    assert {talk.job.ranks[r].node for r in (2, 3)} == {5}


def test_a_scheduler_that_is_never_heard_of_again_is_not_waited_for() -> None:
    """
    When the scheduler answers nothing, then everyone waits as long as the policy has patience,
    and the job then does what it would have done without one.
    """
    talk = Negotiation(patience=90.0)
    talk.job.fault(2, "memory")
    talk.settle()
    began = talk.job.now
    while talk.job.doing == "choosing":
        talk.wait()
    assert talk.job.now - began <= 90.0 + 1.0
    talk.train()
    assert strategies(talk) == ["retry"]
    assert talk.job.doing == "healthy"


def test_a_scheduler_that_takes_over_is_told_of_the_incident_that_is_open() -> None:
    """
    When another scheduler comes while the choice of the one before is awaited, then it is told all of the
    incident, and what it chooses is done.
    """
    talk = Negotiation()
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.job.fault(2, "memory")
    talk.settle()
    told = talk.news()
    assert [name for name, *_ in told] == ["fault_ranks", "stop_complete", "strategies"]

    talk.negotiator.changed()
    talk.on("strategies", lambda us: us.change_strategy("recover"))
    talk.wait()
    assert talk.news() == told
    talk.train()
    assert strategies(talk) == ["recover"]


def test_a_scheduler_that_is_not_there_costs_no_job() -> None:
    """
    When the plugin cannot reach its scheduler and raises, then that is logged, and the job goes
    on as it would have done.
    """
    talk = Negotiation()
    talk.orchestrator.broken = True
    talk.job.fault(2, "memory")
    with capture_logs() as logs:
        talk.settle()
        talk.train()
    assert {entry["hook"] for entry in logs if entry["event"] == "plugin_failed"} == {
        "tft_advise", "tft_on_event",
    }  # fmt: skip
    assert strategies(talk) == ["retry"]
    assert talk.job.doing == "healthy"


def test_a_fault_that_joins_reopens_the_dialogue() -> None:
    """
    When a process dies while the scheduler's choice is awaited, then it hears of both, and is
    offered what is possible now.
    """
    talk = Negotiation()
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.job.fault(2, "memory")
    talk.settle()
    assert talk.news()[-1] == ("strategies", {2: MEMORY}, ALL_LIVE)
    talk.on("strategies", lambda us: us.change_strategy("recover"))
    talk.job.kill(0)
    talk.settle()
    both = {2: MEMORY, 0: PROCESS}
    assert talk.news() == [
        ("fault_ranks", both, codes(both)),
        ("strategies", both, ["exit", "dump", "recover", "downgrade"]),
    ]
    talk.train()
    assert strategies(talk) == ["recover"]


# ---------------------------------------------------------------- hot switch

OFFER = ["exit", "dump", "migration"]


def switching(**facts: Any) -> Negotiation:  # Any: as in `trained`
    """
    A job that is about to switch rank 3 to another node, and its scheduler, who agrees when it is asked.
    """
    talk = Negotiation(**{"placement": WITH_ROOM, "spare": {2: 1}, **facts})
    talk.on("strategies", lambda us: us.change_strategy("migration"))
    talk.negotiator.prepare_action("hot switch", {3: PROCESS})
    return talk


def test_a_pod_is_switched_while_the_job_trains() -> None:
    """
    When the scheduler has a second process made ready for a rank, then the job trains on; when
    it is ready, the scheduler is offered the migration, chooses it, and hears that it has worked.
    """
    talk = switching()
    talk.job.script.slow = {3}
    talk.settle()
    talk.train()
    assert talk.news() == []
    talk.job.arrive(3)
    talk.settle()
    assert talk.news() == [("strategies", {3: PROCESS}, OFFER)]
    talk.train()
    assert talk.news() == [("result", 0, "ok", {3: PROCESS}, "migration")]
    assert (talk.job.ranks[3].node, talk.job.ranks[3].incarnation) == (2, 1)
    assert strategies(talk) == ["migrate"]


def test_a_pod_that_is_deleted_before_the_switch_is_chosen_is_switched_all_the_same() -> None:
    """
    When the scheduler deletes the old pod first and chooses then, then it is told of no other fault, and
    the process that was made ready follows the one that is gone.
    """
    talk = switching(placement={0: (0, 1, 2), 1: (3,), 2: ()})
    talk.on("strategies", lambda us: None)
    talk.settle()
    talk.job.lose_node(1)
    talk.settle()
    assert talk.news() == [("strategies", {3: PROCESS}, OFFER)]
    talk.negotiator.change_strategy("migration")
    talk.wait()
    talk.train()
    assert talk.news() == [("result", 0, "ok", {3: PROCESS}, "migration")]
    assert (talk.job.ranks[3].node, talk.job.ranks[3].incarnation) == (2, 1)


@pytest.mark.parametrize("state", ["healthy", "pausing", "freezing", "clearing", "choosing"])
def test_a_switch_can_be_called_off_in_every_phase(state: str) -> None:
    """
    When the scheduler stops the switch before it has chosen it, then all go on with the processes they
    have, and it is asked nothing about that.
    """
    talk = switching()
    talk.on("strategies", lambda us: None)
    talk.job.script.slow = {3} if state == "healthy" else set()
    talk.settle() if state == "healthy" else talk.until(state)
    talk.negotiator.prepare_action("stop switch", {})
    talk.settle()
    talk.train()
    assert strategies(talk) == ([] if state in ("healthy", "pausing") else ["retry"])
    assert talk.job.ranks[3].incarnation == 0
    assert [said for said in talk.news() if said[0] == "result"] == (
        [] if state in ("healthy", "pausing") else [("result", 0, "ok", {}, "")]
    )


def test_a_switch_waits_until_there_is_a_place() -> None:
    """
    When the new pod comes after the scheduler has said so, then the switch begins when it is there.
    """
    talk = switching(placement=TWO_NODES, spare={2: 1})
    talk.settle()
    talk.train()
    assert talk.news() == []
    talk.job.come(2)
    talk.settle()
    talk.train()
    assert [said[0] for said in talk.news()] == ["strategies", "result"]
    assert talk.job.ranks[3].node == 2


def test_a_switch_that_cannot_be_is_refused_at_once() -> None:
    """
    When the program cannot take part in it, then the scheduler hears so, and the job trains on.
    """
    talk = switching(strategies=("retry", "recover", "dump"))
    talk.settle()
    why = "the adaptor of ranks [0, 1, 2, 3] cannot take part"
    assert talk.news() == [("result", 406, why, {}, "hot switch")]
    assert talk.job.doing == "healthy"


def test_a_new_process_that_dies_before_the_switch_ends_it() -> None:
    """
    When the second process ends while it gets ready, then the scheduler hears so once, and the job trains on.
    """
    talk = switching()
    talk.job.script.slow = {3}
    talk.settle()
    talk.job.kill_successor(3)
    talk.settle()
    talk.train()
    why = "the process that was to take over from rank 3 has ended"
    assert talk.news() == [("result", 406, why, {}, "hot switch")]
    assert talk.job.doing == "healthy"


def test_a_fault_in_the_switch_is_negotiated_like_any_other() -> None:
    """
    When another rank loses its memory while the migration is being chosen, then the scheduler is told of
    that and asked anew.
    """
    talk = switching()
    talk.on("strategies", lambda us: None)
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.settle()
    talk.news()
    talk.job.notice(1, "memory")
    talk.settle()
    said = talk.news()
    assert said[0][0] == "fault_ranks"
    assert said[-1][2] == ["exit", "dump", "retry", "recover", "migration"]
    talk.negotiator.change_strategy("migration")
    talk.wait()
    talk.train()
    assert strategies(talk) == ["migrate"]


# ---------------------------------------------------------------- pause, dump


def test_a_link_is_switched_over_in_a_pause() -> None:
    """
    When the scheduler pauses the job, then it hears when everyone stands, and after its word to
    go on, that they do.
    """
    talk = Negotiation()
    talk.negotiator.pause_train()
    talk.settle()
    assert talk.news() == [("stop_complete", 0, "paused", {})]
    assert talk.job.doing == "paused"
    talk.negotiator.continue_train()
    talk.settle()
    talk.train()
    assert talk.news() == [("result", 0, "ok", {}, "continue")]
    assert talk.job.doing == "healthy"


def test_a_fault_in_a_pause_is_negotiated_like_any_other() -> None:
    """
    When a process dies while the link is switched over, then the scheduler is asked; the pause
    begins again after that, and ends on its word.
    """
    talk = agreeable("recover")
    talk.negotiator.pause_train()
    talk.settle()
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.job.kill(1)
    talk.settle()
    talk.train()
    assert [said[0] for said in talk.news()] == [
        "stop_complete", "fault_ranks", "stop_complete", "strategies", "result", "stop_complete",
    ]  # fmt: skip
    assert talk.job.doing == "paused"
    talk.negotiator.continue_train()
    talk.settle()
    talk.train()
    assert talk.news() == [("result", 0, "ok", {}, "continue")]
    assert talk.job.doing == "healthy"


def test_a_cluster_that_is_drained_has_the_job_saved() -> None:
    """
    When the scheduler asks for a last checkpoint, then there is nothing to negotiate: it hears
    that it is written.
    """
    talk = Negotiation()
    talk.negotiator.dump()
    talk.settle()
    ((name, code, why, faults, strategy),) = talk.news()
    assert (name, code, faults, strategy) == ("result", 0, {}, "dump")
    assert why == "the cluster is drained; a last checkpoint of step 3 is written"
    assert talk.job.over is not None
    assert (talk.job.over.result, talk.job.over.code) == ("dumped", 3)


def test_a_job_that_completes_is_no_result_of_a_recovery() -> None:
    """
    When training is done, then there is nothing to report to a scheduler.
    """
    talk = Negotiation()
    talk.job.finish()
    talk.settle()
    assert talk.news() == []
    assert isinstance(talk.negotiator, Negotiator)
