"""
Tests of graph mode.

A failure outside the compiled graph is handled as in PyNative mode. After a failure inside the
graph, the graph cannot run any more, and a new process takes the rank.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome, identical
from tests.mindspore.conftest import train

SCRIPT = Path(__file__).parent / "graph_job.py"


def job(where: Path, *options: str, struck: str = "") -> Outcome:
    """
    Run the script on two ranks. `struck` names the rank and step of a failure inside the graph.
    """
    arguments = ("16", struck) if struck else ("16",)
    return train(where, *options, script=SCRIPT, arguments=arguments, nproc=2)


@pytest.fixture(scope="module")
def calm_graph(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the script without a fault.
    """
    outcome = job(tmp_path_factory.mktemp("graph") / "calm")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
def test_faults_outside_the_compiled_graph_are_repaired(
    tmp_path: Path, calm_graph: Outcome
) -> None:
    """When a rank dies, and another one reports a memory fault, both between two steps, then the
    survivors keep their compiled graphs, and losses and final state are those of the undisturbed
    run."""
    outcome = job(
        tmp_path / "run",
        "--chaos", "kill:rank=1,step=5,phase=between",
        "--chaos", "raise:rank=0,step=10,phase=between,kind=memory",
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, calm_graph)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "retry"]


@pytest.mark.soak
def test_a_rank_whose_graph_has_failed_gets_a_new_process(
    tmp_path: Path, calm_graph: Outcome
) -> None:
    """When an operator inside the graph fails, then every later run of the graph fails, a new
    process takes the rank, and losses and final state are those of the undisturbed run."""
    outcome = job(tmp_path / "run", struck="1,8")
    assert outcome.code == 0, outcome.output
    identical(outcome, calm_graph)
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("memory", 1), ("process", 1)]
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 1)
