"""
Tests that follow the walk through a last checkpoint in MindSpore Transformers' guide.

Eight processes of real MindSpore train five epochs of one batch. One worker is terminated. The
ranks that together hold everything save checkpoints, and the next run continues from these.

The processes are forked from a process that has imported MindSpore. On two cores the test takes 20
s, and each process needs some 200 MB.
"""

from pathlib import Path

import mindspore
import pytest
from tft_mindspore.layout import savers
from tft_mindspore.mindformers import read_recipe

from tests.e2e.jobs import Outcome
from tests.mindspore.model import LAST, files, layout, told, train

RECIPE = """\
run_mode: 'train'
runner_config:
  sink_mode: True
  sink_size: 1
callbacks:
  - type: CheckpointMonitor
    prefix: "llama2_13b"
parallel:
  parallel_mode: 1
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 1
"""
EPOCHS = 10


def job(run_dir: Path, there: Path, *faults: list[object], **options: object) -> Outcome:
    """
    Run a job with one batch per epoch. The recipe says which ranks hold the same state.
    """
    path = run_dir.with_name("recipe.yaml")
    path.write_text(RECIPE)
    return train(
        run_dir, faults=list(faults), nproc=8, epochs=EPOCHS, enable=LAST,
        recipe=str(path), batches=1, callback=layout(there), **options,
    )  # fmt: skip


def groups(tmp_path: Path) -> list[tuple[int, ...]]:
    """
    Return the groups of ranks that hold the same state according to the recipe.
    """
    return list(read_recipe(tmp_path / "recipe.yaml").sizes.replicas())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the job without a fault.
    """
    directory = tmp_path_factory.mktemp("calm")
    outcome = job(directory / "run", directory / "checkpoint")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.timeout(240)
def test_the_next_run_resumes_after_a_terminated_worker(
    tmp_path: Path, calm: Outcome, gone: int
) -> None:
    """When worker 1 is terminated after five epochs, then ranks 0, 2, 3 and 5 have each written
    their own state under `-5_1`. The next run resumes from these files and ends as the undisturbed
    one. The same holds for worker 0."""
    there = tmp_path / "checkpoint"
    outcome = job(tmp_path / "run", there, [gone, 5, "end", "terminate"])
    assert outcome.code == 3, outcome.output
    assert told(outcome)[0][:2] == ("dump", [("process", gone)])
    for group in groups(tmp_path):
        for rank in group:
            assert f"rank:{rank}, report group list: {list(group)}" in outcome.output

    wrote = savers(groups(tmp_path), gone={gone})
    assert wrote == tuple(sorted({0, 1, 2, 3} - {gone} | {gone + 4}))
    names = [f"rank_{rank}/llama2_13b_rank_{rank}-5_1.ckpt" for rank in wrote]
    assert files(there) == names
    weights = {
        mindspore.load_checkpoint(str(there / name))["first.weight"].asnumpy().tobytes()
        for name in names
    }
    assert len(weights) == 4

    resumed = job(tmp_path / "again", there, resume=True)
    assert resumed.code == 0, resumed.output
    assert resumed.finals() == calm.finals()
    rest = {(rank, step): loss for (rank, step), loss in calm.rows().items() if step > 5}
    assert resumed.rows() == rest
