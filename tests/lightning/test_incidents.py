"""
Trainings with Lightning survive kills at every place of the loop, and end as the undisturbed training
of the same script with Lightning's own strategy, bit for bit.
"""

import csv
import json
from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome
from tests.lightning.trainings import content, differences, plain, protected

SPLIT = ("--accumulate", "3", "--workers", "2")
STOPS = ("--watches", "noise", "--epochs", "6")
PHASES = ("forward", "backward", "collective", "update", "between", "tail")


KINDS = ("--kinds",)
"""The training computes with attributes of many kinds, and has a data module."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the directory of the undisturbed training without tft.
    """
    return plain(tmp_path_factory.mktemp("plain") / "own")


@pytest.fixture(scope="module")
def calm_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the directory of the undisturbed training that computes with attributes of many kinds.
    """
    return plain(tmp_path_factory.mktemp("kinds") / "own", *KINDS)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of a job with an attribute that is not kept and with one that grows.
    """
    faults = chaos("kill:rank=1,step=3,phase=update")
    return protected(tmp_path_factory.mktemp("forgetful"), faults, "--unkept", "--grows")


def chaos(*specs: str) -> tuple[str, ...]:
    """
    Return options of `tft run` that make these faults.
    """
    return tuple(word for spec in specs for word in ("--chaos", spec))


def deaths(*places: str) -> tuple[str, ...]:
    """
    Return arguments of the job that kill ranks at these places.
    """
    return tuple(word for place in places for word in ("--dies", place))


def test_kills_in_all_phases_leave_the_training_as_it_was(tmp_path: Path, calm_kinds: Path) -> None:
    """When both ranks are killed in turn in each phase of a step, in three epochs, then losses,
    batches, logged metrics, checkpoints and final state are those of Lightning's own strategy. The
    training computes with sets, arrays and the like in private attributes, submodules, data module
    and callbacks."""
    steps = (2, 5, 9, 12, 14, 18)
    specs = [
        f"kill:rank={turn % 2},step={step},phase={phase}"
        for turn, (step, phase) in enumerate(zip(steps, PHASES, strict=True))
    ]
    outcome = protected(tmp_path, chaos(*specs), *KINDS)
    assert outcome.code == 0, outcome.output
    assert [each["phase"] for each in outcome.chaos()] == list(PHASES)
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ] * len(PHASES)
    assert differences(tmp_path / "own", calm_kinds) == []


@pytest.mark.soak
def test_kills_between_steps_leave_the_training_as_it_was(tmp_path: Path, calm_kinds: Path) -> None:
    """When ranks are killed in the sanity check, in a validation, while a checkpoint is saved, in a
    callback, and at the end of an epoch, also twice behind the same step, then everything is as
    without a fault, also the attributes of all kinds."""
    places = deaths(
        "sanity:1:0", "validation:0:0", "validation:1:1", "saving:0:7", "saving:1:12", "epoch_end:0:1",
        "batch_end:0:10", "batch_end:1:21",
    )  # fmt: skip
    outcome = protected(tmp_path, (), *KINDS, *places)
    assert outcome.code == 0, outcome.output
    assert len(list((tmp_path / "own").glob("died-*"))) == 8
    assert {i["strategy"] for i in outcome.incidents} == {"recover"}
    assert {tuple(each["inexact"]) for each in outcome.incidents} == {()}
    assert differences(tmp_path / "own", calm_kinds) == []


@pytest.mark.soak
def test_kills_leave_a_training_without_a_data_module_as_it_was(
    tmp_path: Path, undisturbed: Path
) -> None:
    """When ranks are killed in steps, in a validation and behind a step of a training with plain
    loaders, then everything is as with Lightning's own strategy."""
    specs = ("kill:rank=1,step=3,phase=backward", "kill:rank=0,step=13,phase=update")
    places = deaths("validation:0:0", "batch_end:1:8")
    outcome = protected(tmp_path, chaos(*specs), *places)
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == 4
    assert {tuple(each["inexact"]) for each in outcome.incidents} == {()}
    assert differences(tmp_path / "own", undisturbed) == []


@pytest.mark.soak
def test_attributes_of_all_kinds_are_in_a_last_checkpoint(tmp_path: Path) -> None:
    """When a training that computes with such attributes ends with a last checkpoint in the second
    epoch, and is resumed, then everything is as with Lightning's own strategy."""
    calm = plain(tmp_path / "plain", "--kinds", "--epochs", "2")
    broken = protected(tmp_path, (), "--kinds", "--epochs", "2", "--raises", "11")
    assert broken.code == 3, broken.output
    resumed = protected(tmp_path, ("--resume",), "--kinds", "--epochs", "2")
    assert resumed.code == 0, resumed.output
    assert differences(tmp_path / "own", calm) == []


def test_an_attribute_that_is_not_kept_is_named(forgetful: Outcome) -> None:
    """When an object of the user's class changes in a callback, then the log names the attribute
    with the remedy, once, and so does the report of an incident."""
    sentence = "the attribute average of Recorder changes while training"
    assert forgetful.output.count(sentence) == 1
    first = forgetful.incidents[0]
    assert first["strategy"] == "recover"
    assert "average of Recorder" in " ".join(first["inexact"])


@pytest.mark.soak
def test_a_list_that_grows_ends_the_job_and_is_to_be_corrected_first(forgetful: Outcome) -> None:
    """When a list of a callback grows too large, then the job ends with a sentence that names it, and
    the last line says to change the script before the job goes on."""
    assert forgetful.code == 3, forgetful.output
    assert "the attribute all of Recorder has grown" in forgetful.output
    assert "change the script first" in forgetful.output.splitlines()[-1]


@pytest.mark.soak
def test_kills_with_accumulated_gradients_leave_the_training_as_it_was(tmp_path: Path) -> None:
    """When ranks are killed in the micro-batches of a step, and during a repair, with workers that
    load the data, then everything is as without a fault."""
    calm = plain(tmp_path / "plain", *SPLIT)
    outcome = protected(
        tmp_path,
        chaos("kill:rank=0,step=5,phase=backward", "kill:rank=1,step=6,phase=repair"),
        *SPLIT,
        *deaths("training:1:3", "training:0:10", "validation:0:1", "training:1:14"),
    )
    assert outcome.code == 0, outcome.output
    assert differences(tmp_path / "own", calm) == []


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_one_kill_leaves_the_training_as_it_was(
    tmp_path: Path, undisturbed: Path, rank: int, phase: str
) -> None:
    """When a rank is killed in the middle of the second epoch, then everything is as without."""
    outcome = protected(tmp_path, chaos(f"kill:rank={rank},step=11,phase={phase}"))
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == 1
    assert differences(tmp_path / "own", undisturbed) == []


@pytest.mark.soak
def test_kills_in_the_first_and_last_steps_leave_the_training_as_it_was(
    tmp_path: Path, undisturbed: Path
) -> None:
    """When ranks are killed before the first step is complete, behind it, and behind the last step,
    then everything is as without a fault."""
    specs = ("kill:rank=1,step=1,phase=backward", "kill:rank=0,step=1,phase=update")
    places = ("batch_end:0:0", "saving:1:24", "epoch_end:0:2")
    outcome = protected(tmp_path, chaos(*specs), *deaths(*places))
    assert outcome.code == 0, outcome.output
    assert differences(tmp_path / "own", undisturbed) == []


@pytest.mark.soak
def test_a_kill_behind_the_last_all_reduce_loses_no_row(tmp_path: Path, undisturbed: Path) -> None:
    """When rank 0 is killed behind its last all-reduce, so that the others complete the step without
    it, then each row that the script has logged itself is there once, and the state is the same."""
    outcome = protected(tmp_path, (), *deaths("clipping:0:5", "clipping:0:17"))
    assert outcome.code == 0, outcome.output
    own = tmp_path / "own"
    logged = [
        [row["direct"] for row in csv.DictReader(text.splitlines()) if row["direct"]]
        for text in (
            (each / "lightning_logs" / "version_0" / "metrics.csv").read_text()
            for each in (own, undisturbed)
        )
    ]
    assert logged[0] == logged[1]
    # a value of `self.log` in that hook may be the one of the step before
    found = [each for each in differences(own, undisturbed) if each[0] not in "+-@"]
    assert found == []


@pytest.mark.soak
def test_early_stopping_stops_at_the_same_step_after_kills(tmp_path: Path) -> None:
    """When ranks are killed in the last validations before early stopping, then the training stops
    at the step at which it stops without a fault."""
    calm = plain(tmp_path / "plain", *STOPS)
    outcome = protected(tmp_path, (), *STOPS, *deaths("validation:0:1", "epoch_end:1:1"))
    assert outcome.code == 0, outcome.output
    assert differences(tmp_path / "own", calm) == []


@pytest.mark.soak
def test_a_callback_that_raises_ends_the_job_which_can_be_resumed(
    tmp_path: Path, undisturbed: Path
) -> None:
    """When a callback raises, then the job ends with a last checkpoint and shows the error. When the
    same job is resumed without that, then it ends as the undisturbed training."""
    broken = protected(tmp_path, (), "--raises", "10")
    assert broken.code == 3, broken.output
    assert "ValueError: the callback has raised" in broken.output
    resumed = protected(tmp_path, ("--resume",))
    assert resumed.code == 0, resumed.output
    assert differences(tmp_path / "own", undisturbed) == []


@pytest.mark.soak
def test_a_job_without_faults_trains_as_lightning(tmp_path: Path, undisturbed: Path) -> None:
    """When nothing happens, then rows of callbacks are written once, and everything is as with
    Lightning's own strategy."""
    outcome = protected(tmp_path)
    assert outcome.code == 0, outcome.output
    assert differences(tmp_path / "own", undisturbed) == []
    lines = (tmp_path / "own" / "batches-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == list(range(24))


def test_a_last_checkpoint_becomes_one_of_lightning(tmp_path: Path, calm_kinds: Path) -> None:
    """When a job ends with a last checkpoint, and the user has asked for one of the framework too,
    then the checkpoint is written that `ModelCheckpoint` writes after this step, and the job can be
    resumed from its own. Only what `ModelCheckpoint` says about its own files differs."""
    place = tmp_path / "exported"
    faults = ("--chaos", "kill:rank=1,step=8,phase=forward", "--max-incidents", "0")
    broken = protected(tmp_path, ("--export", str(place), *faults), *KINDS)
    assert broken.code == 3, broken.output
    assert "tft: the last checkpoint is written in the form of the framework" in broken.output
    assert (broken.report["result"], broken.report["steps"]) == ("dumped", 7)
    (own,) = calm_kinds.rglob("step-step=7.ckpt")
    found, expected = (content(path, calm_kinds) for path in (place / "step-7.ckpt", own))
    names = [name for name in expected["callbacks"] if "ModelCheckpoint" in name]
    for each in (found, expected):
        each["callbacks"] = {k: v for k, v in each["callbacks"].items() if k not in names}
    assert len(names) == 2
    assert found == expected
