"""
The undisturbed jobs with which other jobs are compared. Each runs once per test run.
"""

import pytest

from tests.e2e.jobs import ROOT, Outcome, run, run_once

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
FAKE_STEPS = 150
GPT_STEPS = 25


@pytest.fixture(scope="session")
def fake_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the fast job without a fault.
    """
    steps = (str(FAKE_STEPS),)
    return run_once(
        tmp_path_factory,
        "fake",
        lambda where: run(where, "--adaptor", "fake", script=FAKE, arguments=steps),
    )


@pytest.fixture(scope="session")
def gpt_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the example job without a fault.
    """
    steps = ("--steps", str(GPT_STEPS))
    return run_once(tmp_path_factory, "gpt", lambda where: run(where, arguments=steps))
