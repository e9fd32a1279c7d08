"""
Tests of recovery from redundant information, as MindSpore's guide describes.

Each card saves its own checkpoint. If the checkpoint of a card is lost, the checkpoint of another
card with the same parameters replaces it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mindspore
import pytest
from mindspore.train import node_strategy_pb2
from tft_mindspore.group_info import GroupInfo, read_group_info, write_group_info

CARDS = Path(__file__).parent / "cards.py"
PARTS = 4


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """
    Run a command in a new process, because MindSpore keeps much state per process.
    """
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "3"},
    )


def losses(ended: subprocess.CompletedProcess[str]) -> dict[int, list[str]]:
    """
    Return the losses of each card from the output of `cards.py`.
    """
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout.splitlines()[-1])
    return {int(card): seen for card, seen in printed.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    """
    Return the checkpoint directory and the losses of a job without faults. Tests copy the
    directory.
    """
    directory = tmp_path_factory.mktemp("undisturbed")
    seen = losses(run(CARDS, "train", directory))
    for card in range(PARTS):
        assert seen[card] == seen[card + PARTS]
    return directory, seen


def leave_group_info(directory: Path) -> None:
    """
    Write the group files that MindSpore writes for each card on an Ascend device.

    The files are made with MindSpore's own classes, because MindSpore does not write them on a CPU.
    """
    for card in range(2 * PARTS):
        group = [card % PARTS, card % PARTS + PARTS]
        made = node_strategy_pb2.ParallelGroupMap()
        item = made.parallel_group_item.add()
        item.group_name = f"2-{card % PARTS}"
        item.parallel_group_ranks.dim.extend(group)
        made.ckpt_restore_rank_list.dim.extend(group)
        (directory / f"rank_{card}" / "group_info.pb").write_bytes(made.SerializeToString())


@pytest.mark.soak
def test_a_card_resumes_from_the_checkpoint_of_its_replica(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, list[str]]]
) -> None:
    """When a job of eight cards ends in its second epoch and card 0's files are lost, then card 0
    gets those of card 4, and the second epoch has the losses of the undisturbed run on every card,
    bit for bit."""
    saved, seen = undisturbed
    steps = len(seen[0]) // 2
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    leave_group_info(tmp_path)
    for card in range(2 * PARTS):
        (tmp_path / f"rank_{card}" / f"checkpoint-2_{steps}.ckpt").unlink()
    shutil.rmtree(tmp_path / "rank_0")

    info = tmp_path / "rank_4" / "group_info.pb"
    assert mindspore.restore_group_info_list(str(info)) == [0, 4]
    done = run("-m", "tft", "checkpoint", "recover", "--group-info", info, "--lost", "0", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")

    resumed = losses(run(CARDS, "resume", tmp_path))
    assert resumed == {card: of_card[steps:] for card, of_card in seen.items()}


@pytest.mark.soak
def test_all_cards_resume_from_a_last_checkpoint(
    tmp_path: Path, undisturbed: tuple[Path, dict[int, list[str]]]
) -> None:
    """When card 1 is lost after step 3 and one card of each group saves from a MindSpore callback,
    then the files have the names of MindSpore's guide, and all eight cards resume from them with
    the losses of the undisturbed run, bit for bit."""
    _, seen = undisturbed
    ended = losses(run(CARDS, "end", tmp_path))
    assert ended == {card: of_card[:3] for card, of_card in seen.items()}
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt")) == [
        f"rank_{rank}/mlp_rank_{rank}-3_1.ckpt" for rank in (0, 2, 3, 5)
    ]
    gone_on = losses(run(CARDS, "go-on", tmp_path))
    steps = len(seen[0]) // 2
    assert gone_on == {card: of_card[3:steps] for card, of_card in seen.items()}


@pytest.mark.soak
def test_a_card_cannot_resume_without_the_recovered_files(tmp_path: Path) -> None:
    """When the lost files are not recovered, then the job does not resume."""
    for card in range(1, 2 * PARTS):
        (tmp_path / f"rank_{card}").mkdir()
    assert run(CARDS, "resume", tmp_path).returncode != 0


@pytest.mark.parametrize(
    "info",
    [
        GroupInfo(replicas=(0, 4), groups={"2-5004544844489628105": (0, 4), "tp-0": (0, 1, 2, 3)}),
        GroupInfo(replicas=(7,), groups={"of none": ()}),
    ],
)
def test_mindspore_reads_the_group_info_file_of_tft(tmp_path: Path, info: GroupInfo) -> None:
    """When tft has written a file, then MindSpore reads the file, and it has the same bytes as the
    file that MindSpore writes."""
    file = tmp_path / "group_info.pb"
    write_group_info(file, info)
    assert mindspore.restore_group_info_list(str(file)) == list(info.replicas)
    theirs = node_strategy_pb2.ParallelGroupMap()
    theirs.ParseFromString(file.read_bytes())
    assert theirs.SerializeToString() == file.read_bytes()
    groups = {
        item.group_name: tuple(item.parallel_group_ranks.dim) for item in theirs.parallel_group_item
    }
    assert groups == info.groups


def test_tft_reads_the_group_info_file_of_mindspore(tmp_path: Path) -> None:
    """When MindSpore's classes have written a file, then tft reads it, in the same process."""
    for card in range(2 * PARTS):
        (tmp_path / f"rank_{card}").mkdir()
    leave_group_info(tmp_path)
    assert read_group_info(tmp_path / "rank_5" / "group_info.pb") == GroupInfo(
        replicas=(1, 5), groups={"2-1": (1, 5)}
    )
