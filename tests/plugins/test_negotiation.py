"""
An external scheduler that takes part in every recovery, one dialogue per test.
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
"""The strategies that are offered when all processes are alive. The last one is the best."""


def agreeable(choice: str, **facts: Any) -> Negotiation:  # Any: as in `trained`
    """
    Return an orchestrator that sees the faults that the job sees, and always chooses this strategy.
    """
    talk = Negotiation(**facts)
    talk.on("stop_complete", lambda us: us.on_global_rank({}))
    talk.on("strategies", lambda us: us.change_strategy(choice))
    return talk


def codes(faults: Ranks) -> dict[int, str]:
    """
    Return the device error codes of the faults, which are unknown.
    """
    return dict.fromkeys(faults, "")


def strategies(talk: Negotiation) -> list[str]:
    """
    Return the strategy of each closed incident.
    """
    return [incident.decision.strategy for incident in talk.job.machine.incidents]


# ---------------------------------------------------------------- retry and recover


def test_scheduler_chooses_retry_after_a_memory_fault() -> None:
    """When the memory of a rank fails, then the scheduler gets the rank, the completed stop and the
    strategies. The scheduler chooses retry and gets the result after one more step."""
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


def test_network_fault_is_reported_with_the_network_type() -> None:
    """When a connection breaks, then the fault that the scheduler gets has the network type."""
    talk = agreeable("retry")
    talk.job.fault(1, "network")
    talk.settle()
    talk.train()
    assert talk.news()[0] == ("fault_ranks", {1: NETWORK}, codes({1: NETWORK}))
    assert strategies(talk) == ["retry"]


def test_rank_that_the_scheduler_reports_joins_the_incident() -> None:
    """When a process dies and the scheduler reports a second rank as lost, then the second process
    is ended. Both ranks are replaced, and the scheduler gets both faults."""
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


def test_strategies_are_offered_as_soon_as_a_reported_rank_has_joined() -> None:
    """When the scheduler reports a second rank only after the plugin has begun to wait, then it is
    offered the strategies when this rank has joined the incident, without a further wait."""
    talk = Negotiation(placement=TWO_NODES)
    talk.job.kill(2)
    talk.settle()
    talk.news()
    talk.negotiator.on_global_rank({2: PROCESS, 3: PROCESS})
    talk.settle()
    both = {2: PROCESS, 3: PROCESS}
    assert talk.news() == [
        ("fault_ranks", both, codes(both)),
        ("strategies", both, ["exit", "dump", "recover", "downgrade"]),
    ]


def test_scheduler_can_report_a_fault_before_the_job() -> None:
    """When the scheduler stops the training for a fault that the job has not detected, then an
    incident begins and is recovered as usual."""
    talk = agreeable("recover")
    talk.negotiator.stop_train({3: PROCESS})
    talk.settle()
    talk.train()
    assert [said[0] for said in talk.news()] == [
        "fault_ranks", "stop_complete", "strategies", "result",
    ]  # fmt: skip
    assert [k.cause for k in talk.job.orders(Kill)] == ["the cluster has reported this fault"]
    assert strategies(talk) == ["recover"]


def test_scheduler_chooses_again_when_retry_fails() -> None:
    """When the fault returns after a retry, then the scheduler gets result 405 and the new list of
    strategies, and chooses again."""
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


def test_scheduler_can_choose_dump_when_recover_fails() -> None:
    """When the successor dies too, then the scheduler gets result 406 and chooses dump. The job is
    dumped, and the scheduler gets the result."""
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


def test_only_exit_is_offered_when_a_shard_is_lost() -> None:
    """When the only holder of a shard dies, then the scheduler gets code 404 and only the strategy
    exit. The job then fails."""
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


def test_job_fails_when_the_scheduler_chooses_an_unoffered_strategy() -> None:
    """When the scheduler chooses a strategy that was not offered, then the scheduler gets result
    499, and the job fails."""
    talk = agreeable("upgrade")
    talk.job.fault(2, "memory")
    talk.settle()
    why = (
        "the cluster has chosen the recovery strategy upgrade, which is not among those that the "
        "controller has offered"
    )
    assert talk.news()[3] == ("result", 499, why, {2: MEMORY}, "upgrade")
    assert talk.job.over is not None
    assert talk.job.over.result == "failed"
    assert talk.job.orders(Save) == []


# ---------------------------------------------------------------- downgrade and upgrade


def test_scheduler_downgrades_the_job_and_upgrades_it_later() -> None:
    """When a node is lost and the scheduler chooses downgrade, then it gets the lost ranks (201)
    and the result. When the node is back, the scheduler chooses upgrade, and the ranks return."""
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


def test_upgrade_chosen_before_the_ranks_return_needs_no_question() -> None:
    """When the scheduler chooses upgrade while ranks are missing, then the ranks return when they
    are ready, and the scheduler is not asked again. Before a downgrade, upgrade has no effect."""
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


def test_downgrade_names_the_ranks_that_leave_with_a_lost_rank() -> None:
    """When one rank is lost and its model replica leaves the job, then the scheduler gets both
    ranks of this replica."""
    talk = agreeable("downgrade", placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=COLUMNS)
    talk.job.lose_node(2)
    talk.settle()
    assert ("result", 201, "", {2: PROCESS, 3: PROCESS}, "downgrade") in talk.news()


# ---------------------------------------------------------------- waiting for the scheduler


def test_job_waits_for_the_scheduler_to_report_its_ranks() -> None:
    """When the scheduler has not yet reported the lost ranks, then the job waits. The negotiation
    continues after the report."""
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


def test_recover_is_offered_when_a_new_node_joins() -> None:
    """When a node is lost and the scheduler makes no choice, then the job waits. When a new node
    has joined, the scheduler is also offered recover."""
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


def test_job_chooses_a_strategy_when_the_scheduler_does_not_answer() -> None:
    """When the scheduler does not answer, then the job waits at most for the patience of the
    policy. The job then follows the strategy that it takes without a scheduler."""
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


def test_longer_time_for_links_holds_for_one_incident() -> None:
    """When the scheduler has asked for more time because of the links, then it has this time in
    this incident. In the next one, a scheduler that does not answer is waited for as usual."""
    talk = Negotiation()
    talk.negotiator.limit = 30.0
    talk.on("stop_complete", lambda us: us.on_global_rank({}, 300.0))
    waited = []
    for _ in range(2):
        talk.job.fault(2, "memory")
        talk.settle()
        began = talk.job.now
        while talk.job.doing == "choosing":
            talk.wait()
        waited.append(round(talk.job.now - began))
        talk.train()
        talk.orchestrator.answers.clear()
    assert waited == [300, 30]


def test_new_scheduler_gets_all_messages_of_the_open_incident() -> None:
    """When another scheduler takes over while a choice is awaited, then the new scheduler gets all
    messages of the incident, and its choice is followed."""
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


def test_job_recovers_when_the_scheduler_cannot_be_reached() -> None:
    """When the plugin cannot reach its scheduler and raises, then the failure is logged, and the
    job follows the strategy that it takes without a scheduler."""
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


def test_second_fault_is_reported_with_new_strategies() -> None:
    """When a process dies while the scheduler's choice is awaited, then the scheduler gets both
    faults and a new list of strategies."""
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
    Return a job that is about to move rank 3 to another node. Its scheduler agrees when it is
    asked.
    """
    talk = Negotiation(**{"placement": WITH_ROOM, "spare": {2: 1}, **facts})
    talk.on("strategies", lambda us: us.change_strategy("migration"))
    talk.negotiator.prepare_action("hot switch", {3: PROCESS})
    return talk


def test_pod_is_switched_while_the_job_trains() -> None:
    """When the scheduler has a successor prepared for a rank, then the job continues to train. When
    the successor is ready, the scheduler is offered migration, chooses it and gets the result."""
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


def test_pod_deleted_before_the_choice_is_still_switched() -> None:
    """When the scheduler deletes the old pod before it chooses migration, then no other fault is
    reported, and the prepared successor takes the rank."""
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
def test_switch_can_be_cancelled_in_every_state(state: str) -> None:
    """When the scheduler cancels a switch before it has chosen migration, then all ranks keep their
    processes. The scheduler gets no migration result."""
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


def test_switch_waits_until_the_new_pod_has_joined() -> None:
    """When the new pod joins after the scheduler has announced the switch, then the switch begins
    when the pod has joined."""
    talk = switching(placement=TWO_NODES, spare={2: 1})
    talk.settle()
    talk.train()
    assert talk.news() == []
    talk.job.come(2)
    talk.settle()
    talk.train()
    assert [said[0] for said in talk.news()] == ["strategies", "result"]
    assert talk.job.ranks[3].node == 2


def test_switch_is_refused_when_the_adaptor_cannot_migrate() -> None:
    """When the adaptor cannot take part in a switch, then the scheduler gets result 406 at once,
    and the job stays healthy."""
    talk = switching(strategies=("retry", "recover", "dump"))
    talk.settle()
    why = "the adaptor of ranks [0, 1, 2, 3] does not support the strategy migrate"
    assert talk.news() == [("result", 406, why, {}, "hot switch")]
    assert talk.job.doing == "healthy"


def test_switch_ends_when_the_successor_dies() -> None:
    """When the successor dies before it is ready, then the scheduler gets result 406 once, and the
    job stays healthy."""
    talk = switching()
    talk.job.script.slow = {3}
    talk.settle()
    talk.job.kill_successor(3)
    talk.settle()
    talk.train()
    why = "the process that was to take over from rank 3 has ended"
    assert talk.news() == [("result", 406, why, {}, "hot switch")]
    assert talk.job.doing == "healthy"


def test_fault_during_a_switch_is_negotiated() -> None:
    """When the memory of another rank fails while the choice of migration is awaited, then the
    scheduler gets that fault and a new list of strategies."""
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


# ---------------------------------------------------------------- pauses and dumps


def test_scheduler_pauses_and_continues_the_job() -> None:
    """When the scheduler pauses the job to switch a link, then it gets a message when the job is
    paused. It gets another message when the job has continued."""
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


def test_fault_during_a_pause_is_negotiated_and_the_pause_resumes() -> None:
    """When a process dies during a pause, then the scheduler is asked for a strategy. The job is
    paused again afterwards, and continues when the scheduler resumes it."""
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


def test_dump_from_the_scheduler_needs_no_negotiation() -> None:
    """When the scheduler asks for a last checkpoint, then nothing is negotiated. The scheduler gets
    the result when the checkpoint is written."""
    talk = Negotiation()
    talk.negotiator.dump()
    talk.settle()
    ((name, code, why, faults, strategy),) = talk.news()
    assert (name, code, faults, strategy) == ("result", 0, {}, "dump")
    assert why == "the cluster is drained; a last checkpoint of step 3 is written"
    assert talk.job.over is not None
    assert (talk.job.over.result, talk.job.over.code) == ("dumped", 3)


def test_completed_job_sends_no_message_to_the_scheduler() -> None:
    """When training is complete, then the scheduler gets no message."""
    talk = Negotiation()
    talk.job.finish()
    talk.settle()
    assert talk.news() == []
    assert isinstance(talk.negotiator, Negotiator)
