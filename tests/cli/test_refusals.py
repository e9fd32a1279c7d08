"""
Refusals of `tft run`: a message says what is wrong before any process is started.
"""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pluggy
import pytest

from tft.cli.main import main
from tft.config import JobSettings
from tft.launcher.run_directory import run_dir_of
from tft.plugins import add
from tft.spi.markers import hookimpl
from tft.spi.plugin import PluginSpecs


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    The exit code and the output of a refused command.
    """

    code: int
    said: str


def tft(folder: Path, *arguments: str) -> Refusal:
    """
    Run `tft` in `folder`, in this process. A refused command starts no process.
    """
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stderr(said),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["tft", *arguments])
        # the logs must stay unconfigured, because later tests capture them
        patch.setattr("tft.cli.commands.configure_logs", lambda: None)
        with pytest.raises(SystemExit) as ended:
            main()
    return Refusal(int(ended.value.code or 0), said.getvalue())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """
    Return a working directory with a script that leaves a mark when it runs.
    """
    script = "from pathlib import Path\nPath('ran').touch()\n"
    (tmp_path / "train.py").write_text(script)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (
            ["--adaptor", "abacus", "train.py"],
            "no installed package provides an adaptor named 'abacus'; installed: ",
        ),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node must be at least 1, not 0"),
        (
            ["--enable", "dump,pray", "train.py"],
            "--enable does not know pray; the strategies are migrate, scale_out, retry, recover, "
            "scale_in, dump",
        ),
        (
            ["--node-rank", "1", "train.py"],
            "--node-rank must be 0 to 0 in a job of --nnodes 1, not 1",
        ),
        (["--nnodes", "2", "train.py"], "needs --job, --broker, --run-dir, the same on every node"),
        (["--broker", "here", "train.py"], "the broker's address is HOST:PORT"),
        (["--broker", "0.0.0.0:29400", "train.py"], "or add --insecure if the network is trusted"),
        (["--host", "192.0.2.1", "train.py"], "or add --insecure if the network is trusted"),
        (["--broker", "0.0.0.0:29400", "train.py"], "Encrypt the messages with --curve"),
        (["--curve", "none", "train.py"], "there is no such directory; `tft keys"),
        (["--curve", "train.py", "train.py"], "there is no such directory; `tft keys"),
        (["--report", "no/where.json", "train.py"], "the directory no"),
        (["--chaos", "tickle:rank=0", "train.py"], "tickle"),
        (["--resume", "train.py"], "--resume needs the --run-dir of the run to continue"),
        (["--export-only", "train.py"], "in the form of the framework: add --resume, and --export"),
        (
            ["--export", "there", "--export-only", "train.py"],
            "in the form of the framework: add --resume, and --export",
        ),
        (
            [
                *("--export", "there", "--nnodes", "2", "--run-dir", "run"),
                *("--job", "j", "--broker", "127.0.0.1:29400", "train.py"),
            ],
            "only for a job of one node that it has started itself",
        ),
        (["--checkpoint-name", "last", "train.py"], "must contain the step once, as {step}"),
        (["--checkpoint-dir", "none", "--resume", "train.py"], "there is no usable checkpoint in"),
        (["--run-dir", "none", "--resume", "train.py"], "there is no usable checkpoint in"),
        (["--run-dir", "train.py", "train.py"], "train.py is not a directory"),
    ],
)
def test_run_with_impossible_arguments_is_refused(
    folder: Path, arguments: list[str], sentence: str
) -> None:
    """When `tft run` has impossible arguments, then the command exits with 2, one sentence gives
    the reason, and no file is written."""
    refusal = tft(folder, "run", *arguments)

    assert refusal.code == 2
    assert sentence in refusal.said
    assert refusal.said.startswith("tft: ")
    assert refusal.said.count("\n") == 1
    assert os.listdir(folder) == ["train.py"]


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("train.py", "train.py is not a directory"),
        ("train.py/runs", "train.py/runs cannot be used: Not a directory"),
        (".", "is not empty: name a new directory"),
    ],
)
def test_verify_without_a_new_directory_is_refused(folder: Path, where: str, sentence: str) -> None:
    """When `tft verify` cannot keep its records in the given directory, then the command exits with
    2, and one sentence gives the reason."""
    refusal = tft(folder, "verify", "--run-dir", where, "train.py")

    assert refusal.code == 2
    assert sentence in refusal.said
    assert refusal.said.startswith("tft: --run-dir ")
    assert refusal.said.count("\n") == 1
    assert os.listdir(folder) == ["train.py"]


@pytest.mark.parametrize("arguments", [[], ["--frobnicate", "train.py"], ["--nnodes", "two", "x"]])
def test_unreadable_command_line_shows_the_usage(folder: Path, arguments: list[str]) -> None:
    """When the command line cannot be parsed, then `tft run` exits with 2, shows its usage, and
    writes no file."""
    refusal = tft(folder, "run", *arguments)

    assert refusal.code == 2
    assert refusal.said.startswith("Usage: tft run [OPTIONS] SCRIPT [ARGS]...")
    assert os.listdir(folder) == ["train.py"]


def test_run_is_refused_when_another_launcher_uses_the_directory(folder: Path) -> None:
    """When another launcher uses the run directory, then `tft run` is refused and its message names
    the pid of that launcher."""
    settings = JobSettings(job="j", run_dir=folder / "run", broker="127.0.0.1:29400")
    with run_dir_of(settings, node=0):
        refusal = tft(folder, "run", "--run-dir", "run", "train.py")

    assert refusal.code == 2
    assert f"in use by another `tft run` (process {os.getpid()})" in refusal.said


def test_run_is_refused_when_the_run_directory_has_a_story(folder: Path) -> None:
    """When the run directory has the story of an earlier run, then `tft run` without `--resume` is
    refused and the story is unchanged."""
    story = folder / "run" / "story.jsonl"
    story.parent.mkdir()
    story.write_text("{}\n")

    refusal = tft(folder, "run", "--run-dir", "run", "train.py")

    assert refusal.code == 2
    assert "add --resume to continue that run" in refusal.said
    assert story.read_text() == "{}\n"
    assert os.listdir(story.parent) == ["story.jsonl"]


@pytest.mark.parametrize("part", ["controller", "agent"])
def test_controller_and_agent_refuse_settings_out_of_bounds(folder: Path, part: str) -> None:
    """When a controller or an agent is started by hand with a setting out of its bounds, then the
    process exits with 2 and names the bound."""
    job = ["--job", "j", "--run-dir", "run", "--broker", "127.0.0.1:29400", "--nnodes", "0"]
    own = ["--node", "0", "train.py"] if part == "agent" else []

    assert tft(folder, part, *job, *own) == Refusal(2, "tft: --nnodes must be at least 1, not 0\n")


def test_controller_refuses_a_damaged_story(folder: Path) -> None:
    """When a line of the story cannot be read, then the controller names the line and exits with 2."""
    story = folder / "run" / "story.jsonl"
    story.parent.mkdir()
    story.write_text('{"n":1,"at":1.0,"kind":"Ope\n')
    job = ["--job", "j", "--run", "r", "--run-dir", "run", "--broker", "127.0.0.1:29400"]

    refusal = tft(folder, "controller", *job)

    assert refusal.code == 2
    assert refusal.said.startswith("tft: run/story.jsonl, line 1: it cannot be read as JSON")
    assert refusal.said.count("\n") == 1


def test_controller_refuses_a_run_directory_that_cannot_be_made(folder: Path) -> None:
    """When the path of the run directory lies below a file, then the controller exits with 2 and
    one sentence gives the reason."""
    where = folder / "train.py" / "run"
    refusal = tft(folder, "controller", "--job", "a", "--run-dir", str(where), "--broker", "h:1")
    assert refusal.code == 2
    assert refusal.said == f"tft: the run directory {where} cannot be made: Not a directory\n"


def test_broker_exits_with_2_when_its_address_cannot_be_used(folder: Path) -> None:
    """When a broker cannot listen at the given address, then the broker names the address and exits
    with 2."""
    refusal = tft(folder, "broker", "--host", "192.0.2.1", "--insecure", "--port", "29400")

    assert refusal.code == 2
    assert refusal.said.startswith("tft: the broker cannot listen at 192.0.2.1:29400")


@pytest.fixture
def keys(folder: Path) -> Path:
    """
    Return a directory with keys of `tft keys`.
    """
    made = tft(folder, "keys", "keys")
    assert made == Refusal(
        0, "tft: keys has the keys of a job: give it to `tft run --curve` on all nodes\n"
    )
    return folder / "keys"


def test_keys_command_is_refused_when_keys_exist(folder: Path, keys: Path) -> None:
    """When the directory already has keys, then `tft keys` is refused and the keys are unchanged."""
    before = {path.name: path.read_bytes() for path in keys.iterdir()}

    refusal = tft(folder, "keys", "keys")

    assert refusal.code == 2
    assert refusal.said.startswith("tft: keys has keys already")
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


@pytest.mark.parametrize("name", ["broker.key", "job.key", "transfer.key"])
def test_secret_key_that_other_users_can_read_is_refused(
    folder: Path, keys: Path, name: str
) -> None:
    """When other users can read a secret key of the job, then `tft run` is refused. The broker is
    also refused when the key is one that it uses."""
    (keys / name).chmod(0o644)

    refusal = tft(folder, "run", "--curve", "keys", "train.py")

    assert refusal.code == 2
    assert f"chmod 600 {keys / name}" in refusal.said
    assert refusal.said.count("\n") == 1
    assert sorted(os.listdir(folder)) == ["keys", "train.py"]
    if name != "transfer.key":
        refusal = tft(folder, "broker", "--curve", "keys")
        assert (refusal.code, f"chmod 600 keys/{name}" in refusal.said) == (2, True)


def test_address_reachable_from_other_machines_is_allowed_with_keys(
    folder: Path, keys: Path
) -> None:
    """When the bus is encrypted with keys, then an address that other machines can reach needs no
    `--insecure`. The only refusal here is that the address is not this machine's own."""
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


@pytest.mark.parametrize("answer", [5, {"name": 1}, ["name"]])
def test_an_environment_of_a_plugin_that_is_no_dict_of_texts_is_refused(
    folder: Path, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a plugin adds to the environment of a job what is no dict of texts, then the run is
    refused with the answer, before any process starts."""

    class Plugin:
        """
        A plugin with a wrong answer.
        """

        @hookimpl
        def tft_environment(self) -> object:
            """
            Return the answer of the test.
            """
            return answer

    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Plugin(), "wrong")
    monkeypatch.setattr("tft.plugins.load_plugins", lambda: manager)
    refused = tft(folder, "run", "--run-dir", "run", "train.py")
    assert refused.code == 2
    assert f"must return a dict of texts, but it has returned {answer!r}" in refused.said
    assert not (folder / "ran").exists()
