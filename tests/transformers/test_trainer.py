"""
A `Trainer` of Transformers in jobs whose ranks are killed: everything that it records is that of the
plain script under torchrun.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import LIMIT, ROOT, Outcome, run, run_once

SCRIPT = ROOT / "tests" / "transformers" / "job.py"
PHASES = ("forward", "backward", "collective", "update", "between", "tail")
MOST = (
    "--items", "42", "--dropout", "0.1", "--random", "--set", "gradient_accumulation_steps=2",
    'eval_strategy="steps"', "eval_steps=3", 'save_strategy="steps"', "save_steps=3",
    "logging_steps=2", "load_best_model_at_end=true", 'metric_for_best_model="loss"',
    "eval_on_start=true", "num_train_epochs=2",
)  # fmt: skip
"""The options of a training with most of what a Trainer does: 12 steps in two epochs."""
EPOCHS = (
    "--items", "16", "--scaler", "--set", 'eval_strategy="epoch"', 'save_strategy="epoch"',
    'logging_strategy="epoch"', "activation_checkpointing=true", "num_train_epochs=3",
)  # fmt: skip
STOPS = (
    "--patience", "1", "--set", 'eval_strategy="steps"', "eval_steps=2", "save_steps=2",
    'save_strategy="steps"', "load_best_model_at_end=true", 'metric_for_best_model="loss"',
    "greater_is_better=true",
)  # fmt: skip

Plain = Callable[..., Path]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """
    Return a function that trains with plain Transformers, and returns the directory of its records.
    """

    return lambda name, *options: plain_under(tmp_path_factory, name, *options)


def plain_under(factory: pytest.TempPathFactory, name: str, *options: str) -> Path:
    """
    Train with plain Transformers under torchrun, once for each name, and return the directory of
    the records.
    """

    def under_torchrun(place: Path) -> Outcome:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            "2", str(SCRIPT), "--plain", "--out", str(place), *options,
        ]  # fmt: skip
        with place.with_suffix(".out").open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code = process.wait(LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output = place.with_suffix(".out").read_text()
        return Outcome(code=code, output=output, run_dir=place)

    return run_once(factory, name, under_torchrun).run_dir


def train(place: Path, arguments: tuple[str, ...], *options: str, adaptor: bool = True) -> Outcome:
    """
    Train as a job of tft. The records are in the directory `out`.
    """
    chosen = ("--adaptor", "transformers") if adaptor else ()
    return run(
        place / "run", *chosen, *options, script=SCRIPT, nproc=2,
        arguments=("--out", str(place / "out"), *arguments),
    )  # fmt: skip


def kills(*faults: str) -> list[str]:
    """
    Return the options of `tft run` for some faults.
    """
    return [word for fault in faults for word in ("--chaos", fault)]


def rows(place: Path, name: str) -> list[str]:
    """
    Return the rows of both ranks, without times.
    """
    found = []
    for path in sorted(place.glob(f"{name}-rank*.jsonl")):
        found += [
            f"{path.stem} {_timeless(row)}"
            for row in map(json.loads, path.read_text().splitlines())
        ]
    return found


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}


def finals(place: Path) -> list[dict[str, Any]]:
    """
    Return what both ranks have at the end: digests of the state, the log, and the losses.
    """
    found = [json.loads(path.read_text()) for path in sorted(place.glob("final-rank*.json"))]
    assert len(found) == 2
    return [{**each, "log": [_timeless(entry) for entry in each["log"]]} for each in found]


def checkpoints(place: Path, below: str = "output") -> dict[str, object]:
    """
    Return the content of the Trainer's checkpoints below a directory of `place`, by file.
    """
    from safetensors.torch import load_file
    from torch import load

    found: dict[str, object] = {}
    for path in sorted((place / below).rglob("*")):
        name = str(path.relative_to(place / below))
        if path.name == "trainer_state.json":
            state = json.loads(path.read_text().replace(str(place), ""))
            found[name] = {**state, "log_history": [_timeless(e) for e in state["log_history"]]}
        elif path.suffix == ".safetensors":
            found[name] = {key: tensor.tolist() for key, tensor in load_file(path).items()}
        elif path.suffix in (".pt", ".pth"):
            found[name] = repr(_plain(load(path, weights_only=False)))
        elif path.suffix == ".json":
            found[name] = path.read_text()
    return found


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


def same(place: Path, undisturbed: Path, *, once: tuple[str, ...] = ("steps", "logs")) -> None:
    """
    Check that a job has recorded the same as the undisturbed plain script. Rows of the names in
    `once` must be there once, other rows at least once.
    """
    assert finals(place) == finals(undisturbed)
    for name in ("losses", "steps", "logs", "evaluations", "saves", "epochs"):
        found, expected = rows(place, name), rows(undisturbed, name)
        if name not in once:
            found, expected = sorted(set(found)), sorted(set(expected))
        assert found == expected, name
    assert checkpoints(place) == checkpoints(undisturbed)


def test_a_trainer_survives_kills_in_all_phases(tmp_path: Path, plain: Plain) -> None:
    """When ranks are killed in each phase of steps with accumulated gradients, then losses, logs,
    callbacks, checkpoints and the final state are those of the plain script. Evaluations of a
    step are repeated only by a fault in the step after it."""
    specs = [
        f"kill:rank={turn % 2},step={2 * turn + 1},phase={phase}"
        for turn, phase in enumerate(PHASES)
    ]
    outcome = train(tmp_path, MOST, *kills(*specs))
    assert outcome.code == 0, outcome.output
    assert [each["phase"] for each in outcome.chaos()] == list(PHASES)
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ] * len(PHASES)
    same(tmp_path / "out", plain("most", *MOST), once=("steps",))


@pytest.mark.soak
def test_an_operation_with_an_aborted_collective_is_repeated(tmp_path: Path) -> None:
    """When a rank is killed before it says how many tokens its batch has, and collectives of the
    device return before they are complete, then the other rank trains with the tokens of both
    ranks, and not with the aborted sum: the loss stays that of random tokens."""
    small = ("--items", "8", "--set", "logging_steps=1", "num_train_epochs=1")
    outcome = train(tmp_path, (*small, "--lagging", "--dies", "1:batches:2"))
    assert outcome.code == 0, outcome.output
    assert {i["strategy"] for i in outcome.incidents} <= {"recover", "retry"}
    for final in finals(tmp_path / "out"):
        losses = [entry["loss"] for entry in final["log"] if "loss" in entry]
        assert losses == [pytest.approx(math.log(64), rel=0.05)] * 2


@pytest.mark.soak
@pytest.mark.parametrize("place", ["batches:4", "prediction:6", "prediction:12"])
def test_a_trainer_survives_a_kill_on_a_lagging_device(
    tmp_path: Path, plain: Plain, place: str
) -> None:
    """When a rank is killed before a collective, and collectives of the device return before they
    are complete, then all records are those of the plain script: also the checkpoints that are kept
    because their metrics are the best."""
    options = (*MOST, "save_total_limit=1")
    outcome = train(tmp_path, (*options, "--lagging", "--dies", f"1:{place}"))
    assert outcome.code == 0, outcome.output
    assert outcome.incidents
    same(tmp_path / "out", plain("best", *options), once=())


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_survives_a_kill(tmp_path: Path, plain: Plain, phase: str, rank: int) -> None:
    """When a rank is killed in a phase, then callbacks of training are called once for each step,
    and all records are those of the plain script."""
    outcome = train(tmp_path, MOST, *kills(f"kill:rank={rank},step=5,phase={phase}"))
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == 1
    same(tmp_path / "out", plain("most", *MOST))


@pytest.mark.soak
@pytest.mark.parametrize(
    "place",
    [
        "0:prediction_step:3", "1:prediction_step:0", "1:evaluate:6", "0:save:9", "1:save:12",
        "0:log:4", "1:step_end:5", "1:substep_end:4", "0:epoch_end:6", "1:epoch_end:12",
    ],
)  # fmt: skip
def test_a_trainer_survives_a_kill_in_a_callback(tmp_path: Path, plain: Plain, place: str) -> None:
    """When a rank is killed in an evaluation, in a checkpoint, between micro-batches, or at the end
    of a step or an epoch, then all records are those of the plain script."""
    outcome = train(tmp_path, (*MOST, "--dies", place))
    assert outcome.code == 0, outcome.output
    assert [i["strategy"] for i in outcome.incidents] == ["recover"]
    same(tmp_path / "out", plain("most", *MOST), once=())


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wrapped", "generators", "counting", "halving", "evaluating"])
def test_a_special_trainer_survives_kills(tmp_path: Path, plain: Plain, name: str) -> None:
    """When a Trainer has something special (see `specials.py`) and ranks are killed, then all records
    are those of the plain script."""
    options = (*MOST, "--special", name)
    specs = ("rank=1,step=5,phase=collective", "rank=0,step=7,phase=backward",
             "rank=0,step=8,phase=tail", "rank=1,step=10,phase=between")  # fmt: skip
    outcome = train(tmp_path, options, *kills(*(f"kill:{spec}" for spec in specs)))
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == len(specs)
    same(tmp_path / "out", plain(name, *options), once=("steps",))


@pytest.mark.soak
def test_a_trainer_survives_faults_at_the_ends_of_epochs(tmp_path: Path, plain: Plain) -> None:
    """When ranks are killed around the ends of epochs, with a GradScaler that overflows, then all
    records are those of the plain script."""
    specs = ("rank=0,step=4,phase=between", "rank=1,step=6,phase=backward",
             "rank=0,step=8,phase=tail", "rank=1,step=12,phase=collective")  # fmt: skip
    outcome = train(tmp_path, EPOCHS, *kills(*(f"kill:{spec}" for spec in specs)))
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == len(specs)
    same(tmp_path / "out", plain("epochs", *EPOCHS), once=("steps",))


@pytest.mark.soak
def test_a_rank_logs_a_step_that_others_have_completed(tmp_path: Path, plain: Plain) -> None:
    """When the others complete the last step of an epoch without the rank that logs, then the entry
    of the epoch has the learning rate and the norm of that step."""
    epochs = ("--items", "16", "--set", 'logging_strategy="epoch"')
    outcome = train(tmp_path, epochs, *kills("raise:rank=0,step=4,phase=update,kind=network"))
    assert outcome.code == 0, outcome.output
    assert finals(tmp_path / "out") == finals(plain("epoch logs", *epochs))


@pytest.mark.soak
def test_a_second_fault_while_the_first_is_repaired(tmp_path: Path, plain: Plain) -> None:
    """When a rank is killed again while it fetches its state, and a survivor has an error, then all
    records are those of the plain script."""
    faults = ("kill:rank=1,step=3,phase=backward", "kill:rank=1,phase=repair,order=fetch",
              "raise:rank=0,step=7,phase=backward,kind=memory",
              "raise:rank=1,step=9,phase=forward,kind=network")  # fmt: skip
    outcome = train(tmp_path, MOST, *kills(*faults))
    assert outcome.code == 0, outcome.output
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "retry", "retry"]
    same(tmp_path / "out", plain("most", *MOST), once=("steps",))


@pytest.mark.soak
def test_early_stopping_stops_at_the_same_step(tmp_path: Path, plain: Plain) -> None:
    """When a rank is replaced just before the evaluation at which the training stops early, then it
    stops at the same step as the plain script."""
    outcome = train(tmp_path, STOPS, *kills("kill:rank=0,step=3", "kill:rank=1,step=4,phase=tail"))
    assert outcome.code == 0, outcome.output
    undisturbed = plain("stops", *STOPS)
    assert finals(undisturbed)[0]["step"] == 4
    same(tmp_path / "out", undisturbed, once=("steps",))


@pytest.mark.soak
def test_a_callback_that_raises_ends_the_job(tmp_path: Path, plain: Plain) -> None:
    """When a callback of the user raises at the end of a step, then the job ends with a last
    checkpoint of that step. A resumed job goes on from there, and all records are those of the
    plain script."""
    small = ("--items", "16", "--set", "logging_steps=2")
    outcome = train(tmp_path, (*small, "--fails", "5"))
    assert outcome.code == 3, outcome.output
    assert "a callback of the user has failed" in outcome.output
    resumed = train(tmp_path, small, "--resume")
    assert resumed.code == 0, resumed.output
    same(tmp_path / "out", plain("small", *small), once=("logs",))


@pytest.mark.soak
def test_a_last_checkpoint_becomes_one_of_the_trainer(tmp_path: Path, plain: Plain) -> None:
    """When a job has ended with a last checkpoint, then a job that resumes only to export it writes
    the checkpoint that the plain Trainer writes after this step, and trains no step. The plain
    Trainer continues from it."""
    small = ("--items", "20", "--dropout", "0.1", "--set", "save_steps=3", 'save_strategy="steps"')
    outcome = train(tmp_path, ("--fails", "3", *small))
    assert outcome.code == 3, outcome.output
    place = tmp_path / "out" / "exported"
    exported = train(tmp_path, small, "--resume", "--export", str(place), "--export-only")
    assert exported.code == 0, exported.output
    assert exported.report["steps"] == 3
    undisturbed = plain("saving", *small)
    found, expected = (
        {name: content for name, content in each.items() if name.startswith("checkpoint-3/")}
        for each in (checkpoints(tmp_path / "out", "exported"), checkpoints(undisturbed))
    )
    assert found == expected
    continued = plain("continued", "--checkpoint", str(place / "checkpoint-3"), *small)
    # a checkpoint of the Trainer does not have the losses since the last log, and the loss in all
    ends = [
        [
            {k: v for k, v in each.items() if k not in ("log", "training_loss")}
            for each in finals(one)
        ]
        for one in (continued, undisturbed)
    ]
    assert ends[0] == ends[1]


@pytest.mark.soak
def test_a_callback_that_changes_parameters_is_refused(tmp_path: Path) -> None:
    """When a callback changes parameters behind the update, then the job ends in its first step with
    a sentence that says what to do."""
    outcome = train(tmp_path, ("--items", "16", "--special", "shrinking"))
    assert outcome.code == 3, outcome.output
    assert "a callback changes parameters in on_optimizer_step" in outcome.output


@pytest.mark.soak
def test_all_ranks_go_back_to_an_earlier_epoch(tmp_path: Path, plain: Plain) -> None:
    """When copies of the state differ, then all ranks go back to a checkpoint in the epoch before,
    in the same processes, and the end is that of the plain script."""
    simple = ("--set", "logging_steps=2")
    options = ("--checkpoint-every", "4", *kills("bitflip:rank=1,step=9,target=param"))
    outcome = train(tmp_path, simple, *options)
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert (incident["step"], incident["processes_started"]) == (9, 0)
    # the copies of step 12 differ from each other; the ranks train on while they are compared
    assert incident["steps_lost"] >= 12 - 8
    assert finals(tmp_path / "out") == finals(plain("simple", *simple))


@pytest.mark.soak
def test_all_ranks_go_back_after_a_resumed_trainer(tmp_path: Path, plain: Plain) -> None:
    """When the Trainer resumes from its own checkpoint within an epoch, a rank is replaced in the
    next epoch, and then all ranks go back to the epoch before, then the next epoch begins with its
    first batch, and the end is that of the plain script."""
    simple = ("--set", "logging_steps=2")
    saved = plain("saved", *simple, 'save_strategy="steps"', "save_steps=3")
    resumed = (*simple, "--checkpoint", str(saved / "output" / "checkpoint-3"))
    faults = ("kill:rank=1,step=9", "bitflip:rank=0,step=11,target=param")
    outcome = train(tmp_path, resumed, "--checkpoint-every", "6", *kills(*faults))
    assert outcome.code == 0, outcome.output
    assert [i["steps_lost"] > 0 for i in outcome.incidents] == [False, True]
    assert finals(tmp_path / "out") == finals(plain("resumed", *resumed))


@pytest.mark.soak
def test_a_job_without_survivors_goes_on_from_a_checkpoint(tmp_path: Path, plain: Plain) -> None:
    """When all ranks are lost at once, with the default adaptor, then the job goes on from a
    periodic checkpoint, or is resumed from it if it was not whole yet. The end is that of the plain
    script."""
    simple = ("--set", "logging_steps=2")
    options = ("--checkpoint-every", "4", *kills("kill:ranks=0+1,step=15"))
    outcome = train(tmp_path, simple, *options, adaptor=False)
    if outcome.code == 4:
        outcome = train(tmp_path, simple, *options, "--resume", adaptor=False)
    assert outcome.code == 0, outcome.output
    assert finals(tmp_path / "out") == finals(plain("simple", *simple))
