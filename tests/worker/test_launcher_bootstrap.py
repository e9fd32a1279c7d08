"""
`tft.init` in a process of another launcher, up to the point where tft replaces the process.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tft.config import inherited_environment, run_options
from tft.errors import UsageError
from tft.spi.launcher import check_options
from tft.worker.launcher_bootstrap import Meeting, adaptor_of, node_words, started_as
from tft.worker.launchers import Launcher

HAND = {
    "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400",
    "TFT_RUN_OPTIONS": "--adaptor fake",
}  # fmt: skip
FILE = "/home/me/train.py"


@pytest.mark.parametrize(
    ("line", "again"),
    [
        (["python", "train.py"], [FILE]),
        (["python", "-u", "train.py", "-m", "--steps", "60"], [FILE, "-m", "--steps", "60"]),
        (["python", "-W", "error", "-Xdev", "-uB", "train.py", "a b"], [FILE, "a b"]),
        (["python", "-OW", "error", "train.py"], [FILE]),
        (["python", "--check-hash-based-pycs", "never", "train.py"], [FILE]),
        (["python", "-m", "mine.train", "-c", "x"], ["-m", "mine.train", "-c", "x"]),
        (["python", "-um", "mine.train"], ["-m", "mine.train"]),
        (["python", "-mmine.train", "1"], ["-m", "mine.train", "1"]),
    ],
)
def test_script_is_started_again_with_its_own_arguments(line: list[str], again: list[str]) -> None:
    """When Python was started with a script or a module, then the same script or module is started
    again with its own arguments."""
    assert started_as(line, FILE) == again


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["python", "-c", "import tft"], "`python -c`"),
        (["python", "-uc", "import tft"], "`python -c`"),
        (["python", "-"], "standard input"),
        (["python"], "standard input"),
        (["python", "-i"], "standard input"),
    ],
)
def test_code_without_a_file_cannot_be_started_again(line: list[str], what: str) -> None:
    """When the code came from `python -c` or from standard input, then the error says that it
    cannot be started again."""
    with pytest.raises(UsageError, match=f"{what}, which cannot be started again"):
        started_as(line, None)


@pytest.mark.parametrize(
    ("options", "adaptor"),
    [
        ([], "pytorch"),
        (["--enable", "dump", "--adaptor", "fake"], "fake"),
        (["--adaptor=fake", "--adaptor", "mine"], "mine"),
        (["--adaptor"], ""),
    ],
)
def test_adaptor_is_taken_from_the_options(options: list[str], adaptor: str) -> None:
    """When the options name an adaptor, then this adaptor is used. Otherwise the default of `tft
    run` is used."""
    assert adaptor_of(options) == adaptor


@pytest.mark.parametrize(
    "word", ["--nnodes", "--node-rank=3", "--nproc-per-node", "--placed", "--starter"]
)
def test_options_that_the_launcher_decides_are_refused(word: str) -> None:
    """When `TFT_RUN_OPTIONS` contains an option that the launcher decides, as the number of nodes,
    then it is refused."""
    with pytest.raises(UsageError, match=f"TFT_RUN_OPTIONS contains {word}, which the launcher"):
        check_options(["--enable", "dump", word])


def test_options_are_split_as_a_shell_splits_them() -> None:
    """When `TFT_RUN_OPTIONS` has quotes, then the quoted words stay together. An unclosed quote is
    refused."""
    assert run_options({}) == ()
    assert run_options({"TFT_RUN_OPTIONS": "--run-dir 'my runs/a' --resume"}) == (
        "--run-dir", "my runs/a", "--resume",
    )  # fmt: skip
    with pytest.raises(UsageError, match="TFT_RUN_OPTIONS cannot be split into options"):
        run_options({"TFT_RUN_OPTIONS": "--run-dir 'my"})


def test_each_process_becomes_its_own_node() -> None:
    """When a process has rank 5 of eight, then it becomes node 5 of eight and keeps its place on
    the machine."""
    launcher = Launcher(
        name="srun", rank=5, world=8, local_rank=1, local_world=4, machine=1, address="a",
        port=6000, serves=False, alone=False,
    )  # fmt: skip
    words = node_words(launcher, Meeting(broker="10.0.0.1:6000", run_dir="/r"), host="10.0.0.2")

    assert " ".join(words) == (
        "--nnodes 8 --node-rank 5 --nproc-per-node 1 --resume-if-any --placed 1 4 1 "
        "--broker 10.0.0.1:6000 --host 10.0.0.2 --run-dir /r"
    )


@pytest.mark.parametrize(
    ("variables", "script", "sentence"),
    [
        (
            {},
            "",
            "needs --run-dir, the same on every node; set this in the environment variable "
            "TFT_RUN_OPTIONS",
        ),
        (
            {"TFT_RUN_OPTIONS": "--adaptor none"},
            "",
            "no installed package provides an adaptor named",
        ),
        ({"TFT_RUN_OPTIONS": "--adaptor fake --bogus"}, "", "No such option"),
        (
            {"MASTER_ADDR": "192.0.2.1"},
            "",
            "or set TFT_RUN_OPTIONS=--insecure if the network is trusted",
        ),
        (
            {"MASTER_ADDR": "nowhere.invalid"},
            "",
            "nowhere.invalid, cannot be resolved on this machine",
        ),
        (
            {"TFT_RUN_OPTIONS": ""},
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n",
            "a process group (init_process_group) exists already",
        ),
    ],
    ids=["no run dir", "adaptor", "option", "insecure", "unknown address", "a group"],
)
def test_wrong_request_is_refused_before_any_process_starts(
    variables: dict[str, str], script: str, sentence: str, tmp_path: Path
) -> None:
    """When a job cannot start as requested, then each process ends with an error sentence and
    leaves no new file."""
    path = tmp_path / "script.py"
    path.write_text(script + "import tft\ntft.init()\n")
    done = subprocess.run(
        [sys.executable, str(path)], env=inherited_environment() | HAND | variables,
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["script.py"]
