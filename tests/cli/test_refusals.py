"""
`tft run` as an operator meets it: what is wrong is said in a sentence, before anything is started.
"""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tft.cli.main import main
from tft.config import JobSettings
from tft.launcher.run_directory import run_dir_of


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    How a command ended.
    """

    code: int
    said: str


def tft(folder: Path, *arguments: str) -> Refusal:
    """
    Run `tft` in `folder`, in this process: what is refused starts nothing.
    """
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(said),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["tft", *arguments])
        patch.setattr("tft.cli.commands.configure_logs", lambda: None)  # later tests capture logs
        with pytest.raises(SystemExit) as ended:
            main()
    return Refusal(int(ended.value.code or 0), said.getvalue())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """
    A working directory with a script that says that it ran.
    """
    script = "from pathlib import Path\nPath('ran').touch()\n"
    (tmp_path / "train.py").write_text(script)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py"], "there is no script at nowhere.py"),
        (
            ["--adaptor", "abacus", "train.py"],
            "no installed package offers an adaptor named 'abacus'; found: ",
        ),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node must be at least 1, not 0"),
        (
            ["--enable", "dump,pray", "train.py"],
            "--enable takes migrate, scale_out, retry, recover, scale_in, dump, and not pray",
        ),
        (
            ["--node-rank", "1", "train.py"],
            "--node-rank must be 0 to 0 in a job of --nnodes 1, not 1",
        ),
        (["--nnodes", "2", "train.py"], "needs --job, --broker, --run-dir, the same on every node"),
        (["--broker", "here", "train.py"], "the broker's address is HOST:PORT"),
        (["--broker", "0.0.0.0:29400", "train.py"], "or add --insecure if the network is trusted"),
        (["--host", "192.0.2.1", "train.py"], "or add --insecure if the network is trusted"),
        (["--broker", "0.0.0.0:29400", "train.py"], "Encrypt it with --curve"),
        (["--curve", "none", "train.py"], "there is no such directory; `tft keys"),
        (["--curve", "train.py", "train.py"], "there is no such directory; `tft keys"),
        (["--report", "no/where.json", "train.py"], "there is no directory no"),
        (["--chaos", "tickle:rank=0", "train.py"], "tickle"),
        (["--resume", "train.py"], "--resume needs the --run-dir of the run to continue"),
        (["--checkpoint-name", "last", "train.py"], "must contain the step once, as {step}"),
        (["--checkpoint-dir", "none", "--resume", "train.py"], "there is no usable checkpoint in"),
        (["--run-dir", "none", "--resume", "train.py"], "there is no usable checkpoint in"),
        (["--run-dir", "train.py", "train.py"], "train.py is not a directory"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, arguments: list[str], sentence: str) -> None:
    """
    When a run is asked for that cannot be, then one sentence says why and nothing has happened.
    """
    refusal = tft(folder, "run", *arguments)

    assert refusal.code == 2
    assert sentence in refusal.said
    assert refusal.said.startswith("tft: ")
    assert refusal.said.count("\n") == 1
    assert os.listdir(folder) == ["train.py"]


@pytest.mark.parametrize("arguments", [[], ["--frobnicate", "train.py"], ["--nnodes", "two", "x"]])
def test_wrong_usage_is_refused(folder: Path, arguments: list[str]) -> None:
    """
    When the command line cannot be read, then the usage is shown and nothing has happened.
    """
    refusal = tft(folder, "run", *arguments)

    assert refusal.code == 2
    assert refusal.said.startswith("Usage: tft run [OPTIONS] SCRIPT [ARGS]...")
    assert os.listdir(folder) == ["train.py"]


def test_a_run_directory_in_use_is_refused(folder: Path) -> None:
    """
    When another launcher is at work in a run directory, then its pid is in the sentence.
    """
    settings = JobSettings(job="j", run_dir=folder / "run", broker="127.0.0.1:29400")
    with run_dir_of(settings, node=0):
        refusal = tft(folder, "run", "--run-dir", "run", "train.py")

    assert refusal.code == 2
    assert f"in use by another `tft run` (process {os.getpid()})" in refusal.said


def test_an_earlier_run_is_not_written_over(folder: Path) -> None:
    """
    When the run directory has a story, then it stays as it is.
    """
    story = folder / "run" / "story.jsonl"
    story.parent.mkdir()
    story.write_text("{}\n")

    refusal = tft(folder, "run", "--run-dir", "run", "train.py")

    assert refusal.code == 2
    assert "add --resume to continue it" in refusal.said
    assert story.read_text() == "{}\n"
    assert os.listdir(story.parent) == ["story.jsonl"]


@pytest.mark.parametrize("part", ["controller", "agent"])
def test_a_part_is_refused_what_a_run_is_refused(folder: Path, part: str) -> None:
    """
    When a part is started by hand with settings out of bounds, then it says so as `tft run` does.
    """
    job = ["--job", "j", "--run-dir", "run", "--broker", "127.0.0.1:29400", "--nnodes", "0"]
    own = ["--node", "0", "train.py"] if part == "agent" else []

    assert tft(folder, part, *job, *own) == Refusal(2, "tft: --nnodes must be at least 1, not 0\n")


def test_a_controller_refuses_a_story_that_is_damaged(folder: Path) -> None:
    """
    When a line of the story cannot be read, then the controller says which and leaves with 2.
    """
    story = folder / "run" / "story.jsonl"
    story.parent.mkdir()
    story.write_text('{"n":1,"at":1.0,"kind":"Ope\n')
    job = ["--job", "j", "--run", "r", "--run-dir", "run", "--broker", "127.0.0.1:29400"]

    refusal = tft(folder, "controller", *job)

    assert refusal.code == 2
    assert refusal.said.startswith("tft: run/story.jsonl, line 1: it cannot be read as JSON")
    assert refusal.said.count("\n") == 1


def test_a_controller_refuses_a_run_directory_that_cannot_be_made(folder: Path) -> None:
    """
    When the run directory of a controller would lie in a file, then a sentence says so.
    """
    where = folder / "train.py" / "run"
    refusal = tft(folder, "controller", "--job", "a", "--run-dir", str(where), "--broker", "h:1")
    assert refusal.code == 2
    assert refusal.said == f"tft: the run directory {where} cannot be made: Not a directory\n"


def test_a_broker_is_refused_a_port_in_use(folder: Path) -> None:
    """
    When a broker cannot listen where it was told to, then it says so and exits 2.
    """
    refusal = tft(folder, "broker", "--host", "192.0.2.1", "--insecure", "--port", "29400")

    assert refusal.code == 2
    assert refusal.said.startswith("tft: the broker cannot listen at 192.0.2.1:29400")


@pytest.fixture
def keys(folder: Path) -> Path:
    """
    Keys, as `tft keys` makes them.
    """
    made = tft(folder, "keys", "keys")
    assert made == Refusal(
        0, "tft: keys has the keys of a job: give it to `tft run --curve` on all nodes\n"
    )
    return folder / "keys"


def test_keys_are_not_written_over(folder: Path, keys: Path) -> None:
    """
    When keys are to be made where there are some, then that is refused and they stay.
    """
    before = {path.name: path.read_bytes() for path in keys.iterdir()}

    refusal = tft(folder, "keys", "keys")

    assert refusal.code == 2
    assert refusal.said.startswith("tft: keys has keys already")
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


@pytest.mark.parametrize("name", ["broker.key", "job.key", "transfer.key"])
def test_a_run_with_keys_that_others_can_read_is_refused(
    folder: Path, keys: Path, name: str
) -> None:
    """
    When others can read a secret of the job, then the job is not started, and nor is a broker.
    """
    (keys / name).chmod(0o644)

    refusal = tft(folder, "run", "--curve", "keys", "train.py")

    assert refusal.code == 2
    assert f"chmod 600 {keys / name}" in refusal.said
    assert refusal.said.count("\n") == 1
    assert sorted(os.listdir(folder)) == ["keys", "train.py"]
    if name != "transfer.key":
        refusal = tft(folder, "broker", "--curve", "keys")
        assert (refusal.code, f"chmod 600 keys/{name}" in refusal.said) == (2, True)


def test_with_keys_an_address_that_others_reach_is_allowed(folder: Path, keys: Path) -> None:
    """
    When the bus is encrypted, then its address may be one that other machines reach: refused is only
    that this one is not a machine's own.
    """
    refusal = tft(
        folder,
        "run",
        "--curve",
        "keys",
        "--broker",
        "192.0.2.1:29400",
        "--host",
        "192.0.2.1",
        "train.py",
    )

    assert refusal.code == 2
    assert "the broker cannot listen at 192.0.2.1:29400" in refusal.said
    refusal = tft(folder, "broker", "--curve", "keys", "--host", "192.0.2.1", "--port", "29400")
    assert "the broker cannot listen at 192.0.2.1:29400" in refusal.said
