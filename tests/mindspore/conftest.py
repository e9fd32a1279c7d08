"""
Jobs of the MindSpore example that other jobs are compared with, run once. `make test-mindspore` runs these
tests, in an environment of their own: elsewhere there is no MindSpore, and they are not collected.
"""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

collect_ignore_glob = [] if find_spec("mindspore") else ["test_*.py"]

EXAMPLE = ROOT / "examples" / "mindspore_mlp" / "train.py"
STEPS = 36


def train(run_dir: Any, *options: str, **how: Any) -> Outcome:  # Any: as `run` takes them
    """
    The example, from its start to its end.
    """
    given = {"script": EXAMPLE, "arguments": ("--steps", str(STEPS)), **how}
    return run(run_dir, "--adaptor", "mindspore", *options, **given)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    The example on four ranks, undisturbed.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "four")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.fixture(scope="session")
def calm_pair(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    The same on two.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "two", nproc=2)
    assert outcome.code == 0, outcome.output
    return outcome
