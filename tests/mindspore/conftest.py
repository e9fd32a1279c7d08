"""
Fixtures for the MindSpore tests: jobs of the MindSpore example without faults, each run once.

Other jobs are compared with these. `make test-mindspore` runs the tests in their own environment.
Elsewhere MindSpore is not installed, and pytest does not collect the tests.
"""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

collect_ignore_glob = [] if find_spec("mindspore") else ["test_*.py"]

EXAMPLE = ROOT / "examples" / "mindspore_mlp" / "train.py"
STEPS = 28


def train(run_dir: Any, *options: str, **how: Any) -> Outcome:  # Any: arguments of `run`
    """
    Run the example to its end and return the outcome.
    """
    given = {"script": EXAMPLE, "arguments": ("--steps", str(STEPS)), **how}
    return run(run_dir, "--adaptor", "mindspore", *options, **given)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the example on four ranks without a fault.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "four")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="session")
def calm_pair(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the example on two ranks without a fault.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "two", nproc=2)
    assert outcome.code == 0, outcome.output
    return outcome
