"""
MindIO's own tests of an orchestrator that decides over a job: its choices and its mistakes.

If a test checks only messages, a script plays the job. The judgement, the advisors and the
negotiator are the real ones.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindio_ttp.negotiator import MEMORY, PROCESS, Negotiator

from tests.mindio.jobs import Outcome, job
from tests.mindio.test_jobs import HALVES, assert_same
from tests.mindio.test_jobs import run as run_alone
from tests.mindio.test_orchestrated import Manager, heard, manager
from tests.plugins.negotiation import Negotiation
from tests.plugins.test_negotiation import agreeable, strategies
from tft.bus.ports import free_address
from tft.protocol.messages import Load, Order, Restore, Rollback, Save

LIVE = "exit,dump,retry,recover"
"""The strategies that are offered when all processes are alive."""
WAYS_BACK: tuple[type[Order], ...] = (Rollback, Load, Restore)
LOST = "exit,dump,recover"


def run(directory: Path, *faults: list[Any], **options: Any) -> Outcome:  # Any: JSON
    """
    Run a job whose rank 0 speaks for the cluster, and return its outcome.
    """
    return run_alone(
        directory,
        *faults,
        orchestrated=True,
        run_options="--orchestrated",
        groups=HALVES,
        **options,
    )


# ---------------------------------------------------------------- choices of the orchestrator in whole jobs


@pytest.mark.soak
def test_a_chosen_exit_repairs_and_saves_nothing(tmp_path: Path) -> None:
    """When rank 3 is lost and the orchestrator chooses the exit, then no rank cleans, repairs or
    saves, and the wait functions of the survivors tell them to exit."""
    outcome = run(tmp_path, [3, 4, "update", "kill"], choices={LOST: "exit"})
    assert outcome.codes == [4], outcome.output
    for what in ("clean", "repair", "rollback", "save", "rename", "returned"):
        assert outcome.called(what) == []
    assert heard(outcome)[2] == ("strategies", ["exit", "dump", "recover"])


@pytest.mark.soak
def test_a_chosen_last_checkpoint_is_saved_by_one_of_each_part(tmp_path: Path) -> None:
    """When rank 3 is lost and a last checkpoint is chosen, then ranks 0 and 1 save it, one of them
    names it, no rank repairs, and the orchestrator is told that it is written."""
    outcome = run(tmp_path, [3, 4, "loop", "kill"], choices={LOST: "dump"})
    assert outcome.codes == [3], outcome.output
    assert outcome.ranks_called("save") == [0, 1]
    assert len(outcome.called("rename")) == 1
    for what in ("clean", "repair", "rollback", "returned"):
        assert outcome.called(what) == []


@pytest.mark.soak
def test_the_choice_of_an_unknown_strategy_ends_the_job(tmp_path: Path) -> None:
    """When the orchestrator chooses an unknown strategy, then it gets the result 499, and no rank
    repairs or saves."""
    outcome = run(tmp_path, [3, 4, "loop", "kill"], choices={LOST: "reboot the moon"})
    assert outcome.codes == [4], outcome.output
    assert heard(outcome)[3] == ("result", (499, "reboot the moon"))
    for what in ("clean", "repair", "rollback", "save", "rename"):
        assert outcome.called(what) == []


@pytest.mark.soak
def test_a_job_decides_by_itself_when_the_orchestrator_fails(tmp_path: Path) -> None:
    """When the orchestrator's function fails, then the controller waits for its time limit, and the
    job decides by itself. Rank 3 has lost its part in its update and gets it from rank 1."""
    outcome = run(
        tmp_path, [3, 4, "update", "UCE ERROR"], choices={LIVE: "raise"},
        environment={"MINDIO_WAIT_MINDX_TIME": "1"},
    )  # fmt: skip
    assert_same(outcome)
    assert outcome.strategies == ["retry"]
    assert {(call["src"][0], call["dst"][0]) for _, call in outcome.called("repair")} == {(1, 3)}


@pytest.mark.soak
def test_a_manager_pauses_resumes_and_ends_the_job(tmp_path: Path) -> None:
    """When a manager stops the training before it began, or names ranks that do not exist, then the
    order has no effect. A pause holds all ranks between two steps without stop or clean until the
    manager resumes them. A hot switch without a free place has no effect. An order for a last
    checkpoint saves and ends the job."""
    port = int(free_address("127.0.0.1").rpartition(":")[2])
    with manager(tmp_path / "manager", port) as managing:
        assert managing.ask("query_high_availability_switch") is True
        assert managing.ask("notify_controller_stop_train", {"3": PROCESS}) == 0
        assert managing.ask("notify_controller_stop_train", {"4": PROCESS}) == 1
        assert managing.ask("notify_controller_stop_train", {"3": 3}) == 1
        assert managing.ask("notify_controller_stop_train", {}, "rest") == 1
        assert managing.ask("notify_controller_on_global_rank", {"0": PROCESS}, 3601) == 1
        assert managing.ask("notify_controller_prepare_action", "cold switch", {}) == 1
        assert managing.ask("notify_controller_change_strategy", "downgrade") == 1
        with job(
            tmp_path / "job", launched=True, groups=HALVES, port=port, steps=100_000,
            environment={"MINDX_TASK_ID": "task-7"},
        ) as running:  # fmt: skip
            until(running.directory / "losses-3.jsonl")
            assert managing.ask("notify_controller_stop_train", {}, "pause", 60) == 0
            said(managing, ("stop_complete", 0))
            told = steps_done(running.directory)
            assert managing.ask("notify_controller_change_strategy", "continue") == 0
            said(managing, ("result", (0, "continue")))
            assert len(set(told)) == 1
            assert managing.ask("notify_controller_prepare_action", "hot switch", {"3": 1}) == 0
            assert managing.ask("notify_controller_prepare_action", "stop switch") == 0
            assert managing.ask("notify_controller_dump") == 0
            outcome = running.end()
        said(managing, ("result", (0, "dump")))
    assert set(outcome.codes) == {3}, outcome.output
    assert outcome.ranks_called("save") == [0, 1]
    assert len(outcome.called("rename")) == 1
    for what in ("clean", "repair", "rollback"):
        assert outcome.called(what) == []


def until(path: Path) -> None:
    """
    Wait until a file exists.
    """
    while not path.exists():
        time.sleep(0.02)


def said(managing: Manager, report: tuple[str, Any]) -> None:
    """
    Wait until `report` is the last report that the manager has received.
    """
    while managing.heard()[-1:] != [report]:
        time.sleep(0.02)


def steps_done(directory: Path) -> list[int]:
    """
    Return the number of losses that each rank has computed.
    """
    return [len((directory / f"losses-{rank}.jsonl").read_text().splitlines()) for rank in range(4)]


# ---------------------------------------------------------------- early, late and repeated calls


def test_answers_in_the_wrong_order_are_accepted() -> None:
    """When the orchestrator sends the fault ranks although a stop was expected, and the other way
    round, then the dialogue continues, and all ranks train on."""
    talk = Negotiation()
    talk.on("fault_ranks", lambda us: us.on_global_rank({2: MEMORY}))
    talk.on("stop_complete", lambda us: us.stop_train({2: MEMORY}))
    talk.on("strategies", lambda us: us.change_strategy("retry"))
    talk.job.fault(2, "memory")
    talk.settle()
    talk.train()
    assert [name for name, *_ in talk.news()] == [
        "fault_ranks", "stop_complete", "strategies", "result",
    ]  # fmt: skip
    assert strategies(talk) == ["retry"]


def twice(answer: Callable[[Negotiator], None]) -> Callable[[Negotiator], None]:
    """
    Return a function that gives the same answer twice.
    """

    def answer_twice(us: Negotiator) -> None:
        answer(us)
        answer(us)

    return answer_twice


def test_a_repeated_answer_counts_once() -> None:
    """When the orchestrator sends every answer twice, then there is one incident, and one
    result."""
    talk = Negotiation()
    talk.on("fault_ranks", twice(lambda us: us.stop_train({2: MEMORY})))
    talk.on("stop_complete", twice(lambda us: us.on_global_rank({})))
    talk.on("strategies", twice(lambda us: us.change_strategy("retry")))
    talk.job.fault(2, "memory")
    talk.settle()
    talk.train()
    assert [name for name, *_ in talk.news()].count("result") == 1
    assert strategies(talk) == ["retry"]


@pytest.mark.parametrize("early", ["dump", "exit", "migration", "retry"])
def test_a_choice_without_an_incident_is_ignored(early: str) -> None:
    """When a strategy is chosen while the job trains, then the job trains on, and the choice is not
    used in the next incident."""
    talk = agreeable("retry")
    talk.negotiator.change_strategy(early)
    talk.settle()
    talk.train()
    assert talk.job.doing == "healthy"
    talk.job.fault(2, "memory")
    talk.settle()
    talk.train()
    assert strategies(talk) == ["retry"]


@pytest.mark.parametrize("choice", ["dump", "exit"])
def test_an_orchestrator_can_give_up_a_missing_replacement(choice: str) -> None:
    """When the new process of a rank does not come, and the orchestrator chooses to end, then the
    job ends at once with the survivors' last checkpoint."""
    talk = agreeable("recover")
    talk.job.script.slow = {3}
    talk.job.kill(3)
    talk.settle()
    assert talk.job.doing == "awaiting"
    talk.negotiator.change_strategy(choice)
    talk.settle()
    assert {each.step for each in talk.job.orders(Save)} == {3}
    why = f"the cluster chose {choice}; a last checkpoint of step 3 is written"
    assert talk.news()[-1] == ("result", 0, why, {3: PROCESS}, "dump")


def test_a_pause_that_is_not_resumed_ends_at_its_limit() -> None:
    """When the orchestrator does not resume a pause, then it gets the result 406 at the limit, and
    the job trains on."""
    talk = Negotiation()
    talk.negotiator.pause_train(0.0)
    talk.settle()
    while talk.job.doing != "healthy":
        talk.settle()
        talk.job.train()
    assert (
        "result",
        406,
        "the cluster has not continued the job for 0 s",
        {},
        "continue",
    ) in talk.news()
    assert talk.job.doing == "healthy"


def test_polluted_copies_are_neither_repaired_from_nor_saved() -> None:
    """When every rank may have wrong numbers, then neither a repair from replicas nor a last
    checkpoint is offered."""
    talk = agreeable("exit")
    before = [talk.job.orders(kind) for kind in WAYS_BACK]
    for rank in range(4):
        talk.job.fault(rank, "numeric", polluted=True)
    talk.settle()
    assert ("strategies", dict.fromkeys(range(4), MEMORY), ["exit"]) in talk.news()
    assert talk.job.orders(Save) == []
    assert [talk.job.orders(kind) for kind in WAYS_BACK] == before
