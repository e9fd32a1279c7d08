"""
Jobs that go back to the copies that their ranks keep in host memory.
"""

from pathlib import Path

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.doubts import doubts
from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "backups_job.py"
EXAMPLES = ROOT / "examples" / "gpt"
OTHERS = {
    "fsdp": (EXAMPLES / "sharded.py", "--layout", "fsdp"),
    "pipeline": (EXAMPLES / "pipeline.py",),
    "replicas": (EXAMPLES / "replicas.py",),
}


def test_all_ranks_go_back_to_their_copies_in_host_memory(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When no copy after a step is sound, then all ranks take back the copy of an earlier step, and
    the job ends as the undisturbed one. A rank that was killed, in its update or in the middle of a
    copy, fetches the copy of another rank. A copy that was slow when its rank was interrupted can
    be taken back, too."""
    specs = (
        "raise:rank=1,step=7,phase=forward,kind=memory",
        "kill:rank=2,step=14,phase=update",
        "raise:rank=0,step=24,phase=backward,kind=network",
    )
    limits = {1: ("retry", 5), 2: ("recover", 10), 4: ("retry", 22)}
    outcome = run(
        tmp_path / "run", "--backup-every", "4", *(w for s in specs for w in ("--chaos", s)),
        script=SCRIPT, environment=doubts(tmp_path, limits),
        arguments=("--dies", "1,20", "--lags", "3,20", "--steps", str(GPT_STEPS)),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    assert [
        (i["strategy"], i["step"] - 1, i["processes_started"], i["pids_kept"])
        for i in outcome.incidents
    ] == [
        ("go back", 4, 0, True),
        ("go back", 8, 1, True),
        ("recover", 20, 1, True),
        ("go back", 20, 0, True),
    ]
    assert [i["steps_lost"] for i in outcome.incidents] == [2, 6, 0, 3]


@pytest.mark.soak
@pytest.mark.parametrize("kind", OTHERS)
def test_sharded_state_goes_back_to_its_copies_in_host_memory(kind: str, tmp_path: Path) -> None:
    """When ranks hold different shards, and no copy after a step is sound, then each rank takes back
    its own copy, or that of the other holder if it was killed, and the job ends as the undisturbed
    one."""
    script, *more = OTHERS[kind]
    arguments = ("--steps", str(GPT_STEPS), *more)
    undisturbed = run(tmp_path / "undisturbed", script=script, arguments=arguments)
    outcome = run(
        tmp_path / "run", "--backup-every", "4",
        "--chaos", "raise:rank=1,step=11,phase=forward,kind=memory",
        "--chaos", "kill:rank=2,step=22,phase=update",
        script=script, arguments=arguments,
        environment=doubts(tmp_path, {1: ("retry", 9), 2: ("recover", 18)}),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed)
    assert [(i["strategy"], i["step"] - 1) for i in outcome.incidents] == [
        ("go back", 8),
        ("go back", 16),
    ]
