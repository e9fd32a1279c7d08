"""Last checkpoints in the layout of MindSpore Transformers: which ranks write them, which files are
valid, and from which file each rank resumes."""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tft_mindspore.environment import read
from tft_mindspore.layout import (
    Found,
    Series,
    directory_of,
    find,
    open_series,
    resumption,
    savers,
)
from tft_mindspore.mindformers import Recipe, Sizes, read_recipe

from tft.errors import CheckpointCorrupt, OrderRefused, UsageError

GROUPS = Sizes(dp=8, shards=4).replicas()
"""(0, 4), (1, 5), (2, 6), (3, 7)."""
WORLD = range(8)


def content(rank: int, epoch: int) -> bytes:
    """Return a .ckpt file with one parameter."""
    return b"\x0a\x04" + bytes([rank % 4, epoch, 1, rank])


def writing(rank: int, epoch: int) -> Callable[[Path], object]:
    """
    Return the function that writes the checkpoint file of this rank and epoch.
    """
    return lambda path: path.write_bytes(content(rank, epoch))


def save(root: Path, ranks: Collection[int], epoch: int, *, noted: bool = True) -> None:
    """Have these ranks write the end of an epoch, in one run."""
    for rank in ranks:
        series = Series(root=root, rank=rank, prefix="llama2_13b")
        series.save(epoch, 1, writing(rank, epoch))
        if noted:
            series.note(epoch, 1)


def leave(root: Path, rank: int, epoch: int) -> None:
    """
    Write the checkpoint file and the `meta.json` of one rank and epoch, without `fsync`.
    """
    name = f"llama2_13b_rank_{rank}-{epoch}_1.ckpt"
    directory_of(root, rank).mkdir(exist_ok=True)
    (directory_of(root, rank) / name).write_bytes(content(rank, epoch))
    meta = {"last_epoch": epoch, "last_step": 1, "last_ckpt_file": name}
    (directory_of(root, rank) / "meta.json").write_text(json.dumps(meta))


def sources(found: Found) -> dict[int, int]:
    """Return for each rank the rank from whose file it resumes."""
    return {rank: int(path.parent.name.removeprefix("rank_")) for rank, path in found.files.items()}


# ---------------------------------------------------------------- ranks that write checkpoint files


def test_one_rank_of_each_group_saves_as_documented() -> None:
    """When rank 1 of 8 is lost, then ranks 0, 3, 2 and 5 write the last checkpoint. With full
    saving all survivors write."""
    assert savers(GROUPS, gone={1}) == (0, 2, 3, 5)
    assert savers(GROUPS, gone={1}, everyone=True) == (0, 2, 3, 4, 5, 6, 7)
    assert savers(GROUPS) == (0, 1, 2, 3)


def test_no_last_checkpoint_is_written_when_a_whole_group_is_lost() -> None:
    """When all ranks of a group are lost, then no rank writes a last checkpoint, and the error
    names the lost group."""
    with pytest.raises(
        OrderRefused, match="ranks 1, 5 are lost, and no other rank holds the same state"
    ):
        savers(GROUPS, gone={1, 5, 6})


# ---------------------------------------------------------------- names of checkpoint files


def test_the_last_checkpoint_has_the_documented_file_names(tmp_path: Path) -> None:
    """When the last checkpoint of step 5 is written after the loss of rank 1, then its files have
    the documented names."""
    save(tmp_path, savers(GROUPS, gone={1}), 5)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt")) == [
        "rank_0/llama2_13b_rank_0-5_1.ckpt",
        "rank_2/llama2_13b_rank_2-5_1.ckpt",
        "rank_3/llama2_13b_rank_3-5_1.ckpt",
        "rank_5/llama2_13b_rank_5-5_1.ckpt",
    ]
    assert json.loads((tmp_path / "rank_5" / "meta.json").read_text()) == {
        "last_epoch": 5,
        "last_step": 1,
        "last_ckpt_file": "llama2_13b_rank_5-5_1.ckpt",
    }
    assert sorted(os.listdir(tmp_path / "rank_5")) == ["llama2_13b_rank_5-5_1.ckpt", "meta.json"]


def test_a_later_run_counts_up_in_its_file_names(tmp_path: Path) -> None:
    """When a run begins in a directory with files of an earlier run, then its file names have the
    next run number. Each rank counts for itself."""
    assert open_series(tmp_path, 0, "llama2_13b").again == 0
    save(tmp_path, [0], 5)
    again = open_series(tmp_path, 0, "llama2_13b")
    assert again.save(7, 1, writing(0, 7)).name == "llama2_13b_rank_0_1-7_1.ckpt"
    assert open_series(tmp_path, 0, "llama2_13b").again == 2
    (tmp_path / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").unlink()  # as if removed because it is old
    assert open_series(tmp_path, 0, "llama2_13b").again == 2
    assert open_series(tmp_path, 1, "llama2_13b").again == 0
    assert open_series(tmp_path, 0, "llama2").again == 0


@pytest.mark.parametrize("prefix", ["", "a/b", "../a", ".a"])
def test_a_prefix_with_path_parts_is_refused(tmp_path: Path, prefix: str) -> None:
    """When a prefix would lead to another directory or to a hidden file, then it is refused."""
    with pytest.raises(
        UsageError, match="must be a name that does not begin with a dot, and not a path"
    ):
        open_series(tmp_path, 0, prefix)


# ---------------------------------------------------------------- resuming from checkpoint files


def test_all_ranks_resume_from_a_last_checkpoint(tmp_path: Path) -> None:
    """When one rank of each group has a file, then the other ranks of the group resume from that
    file."""
    save(tmp_path, [0, 2, 3, 5], 5)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert (found.epoch, found.step, found.last) == (5, 1, True)
    assert found.written == (0, 2, 3, 5)
    assert sources(found) == {0: 0, 4: 0, 1: 5, 5: 5, 2: 2, 6: 2, 3: 3, 7: 3}


def test_each_rank_resumes_from_its_own_file_of_a_full_checkpoint(tmp_path: Path) -> None:
    """When every rank has a file, then the checkpoint is not a last checkpoint and each rank
    resumes from its own file, with and without high availability."""
    save(tmp_path, WORLD, 5)
    for on in (True, False):
        found = find(tmp_path, GROUPS, high_availability=on)
        assert not found.last
        assert sources(found) == {rank: rank for rank in WORLD}


def test_without_high_availability_a_last_checkpoint_is_refused(tmp_path: Path) -> None:
    """When the newest checkpoint is a last checkpoint and high availability is off, then the error
    names the ranks without a file, although an older full checkpoint exists."""
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3, 5], 5)
    with pytest.raises(UsageError) as refused:
        find(tmp_path, GROUPS, high_availability=False)
    assert str(refused.value) == (
        f"ranks 1, 4, 6, 7 have no file of step 1 of epoch 5 in {tmp_path}: it is a last "
        "checkpoint, of which one rank of each group of replicas has a file, and can be resumed "
        "with high availability on, as by MS_ENABLE_TFT={TTP:1}"
    )


def test_a_checkpoint_that_lacks_a_group_is_skipped(tmp_path: Path) -> None:
    """When a last checkpoint was interrupted before every group had its file, then the ranks resume
    from the one before, and the skipped one is reported."""
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3], 5)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert (found.epoch, found.last, found.passed_over) == (4, False, ((5, 1),))
    assert sources(found) == {rank: rank for rank in WORLD}


def test_a_file_without_meta_json_entry_is_ignored(tmp_path: Path) -> None:
    """When a rank was killed before its `meta.json` was written, then its newest file is
    ignored."""
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3], 5)
    save(tmp_path, [5], 5, noted=False)
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_a_later_runs_file_is_ignored_until_meta_json_names_it(tmp_path: Path) -> None:
    """When a later run was interrupted before `meta.json` named its file of the same step, then the
    file of the earlier run is used."""
    save(tmp_path, WORLD, 4)
    open_series(tmp_path, 0, "llama2_13b").save(4, 1, writing(0, 4))
    found = find(tmp_path, GROUPS, high_availability=True)
    assert found.files[0].name == "llama2_13b_rank_0-4_1.ckpt"


def test_a_later_runs_file_of_the_same_step_is_preferred(tmp_path: Path) -> None:
    """When two runs have written the same step, then the file of the later run is used."""
    for again in range(12):
        series = Series(root=tmp_path, rank=0, prefix="a", again=again)
        series.save(4, 1, writing(0, 4))
        series.note(4, 1)
    found = find(tmp_path, [(0,)], high_availability=False)
    assert found.files[0].name == "a_rank_0_11-4_1.ckpt"


def test_files_of_another_model_or_rank_are_ignored(tmp_path: Path) -> None:
    """When the directory has files of another model, or `meta.json` names the file of another rank,
    then these files are ignored."""
    save(tmp_path, WORLD, 4)
    Series(root=tmp_path, rank=0, prefix="other").save(3, 1, writing(0, 3))
    found = find(tmp_path, [(0,), *((rank,) for rank in range(1, 8))], high_availability=False)
    assert (found.epoch, found.passed_over) == (4, ())
    with pytest.raises(UsageError, match="has no file of step 1 of epoch 3"):
        find(tmp_path, GROUPS, high_availability=True, only=(3, 1))

    meta = (tmp_path / "rank_1" / "meta.json").read_text()
    (tmp_path / "rank_5" / "meta.json").write_text(meta)
    assert 5 not in find(tmp_path, GROUPS, high_availability=True).written


def test_the_file_of_the_lowest_rank_of_a_group_is_used(tmp_path: Path) -> None:
    """When several ranks of a group have a file, then the others resume from the file of the lowest
    rank, for any order of the group."""
    save(tmp_path, [1, 2], 4)
    found = find(tmp_path, [(3, 2, 0, 1)], high_availability=True)
    assert sources(found) == {0: 1, 1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("cut", [b"", content(5, 5)[:-1], b"\x00"])
def test_a_truncated_file_is_ignored(tmp_path: Path, cut: bytes) -> None:
    """When a file is empty or truncated, then it is ignored, although `meta.json` names it."""
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3, 5], 5)
    (tmp_path / "rank_5" / "llama2_13b_rank_5-5_1.ckpt").write_bytes(cut)
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_a_failed_save_leaves_the_earlier_checkpoint_usable(tmp_path: Path) -> None:
    """When a rank fails while it writes, then the earlier files are unchanged and the ranks resume
    from them."""
    save(tmp_path, WORLD, 4)
    before = sorted(tmp_path.rglob("*"))

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Series(root=tmp_path, rank=5, prefix="llama2_13b").save(5, 1, fail)
    assert sorted(tmp_path.rglob("*")) == before
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_steps_of_an_abandoned_run_are_ignored(tmp_path: Path) -> None:
    """When a later run began anew and reached an earlier step, then the later steps of the earlier
    run are ignored."""
    save(tmp_path, WORLD, 100)
    for rank in WORLD:
        series = open_series(tmp_path, rank, "llama2_13b")
        series.save(5, 1, writing(rank, 5))
        series.note(5, 1)
    found = find(tmp_path, GROUPS, high_availability=False)
    assert (found.epoch, found.files[0].name) == (5, "llama2_13b_rank_0_1-5_1.ckpt")


def test_a_last_checkpoint_of_a_resumed_run_is_used(tmp_path: Path) -> None:
    """When a job resumed from a last checkpoint and other ranks write the next one, then files with
    different run numbers count as one step."""
    save(tmp_path, [0, 2, 3, 5], 5)
    for rank in (1, 2, 3, 4):
        series = open_series(tmp_path, rank, "llama2_13b")
        assert series.again == (1 if rank in (2, 3) else 0)
        series.save(9, 1, writing(rank, 9))
        series.note(9, 1)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert found.epoch == 9
    assert sources(found) == {0: 4, 4: 4, 1: 1, 5: 1, 2: 2, 6: 2, 3: 3, 7: 3}


def test_a_directory_without_checkpoint_is_refused_with_the_expected_layout(tmp_path: Path) -> None:
    """When there is no checkpoint, or `meta.json` names none, then the error says which files are
    expected."""
    save(tmp_path, [0], 5, noted=False)
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"has no checkpoint to continue from: expected are"):
            find(root, GROUPS, high_availability=True)


def test_a_group_without_any_file_is_named(tmp_path: Path) -> None:
    """When no step has a file of every group, then the error names a group that lacks its newest
    file."""
    save(tmp_path, [0, 2, 3], 5)
    with pytest.raises(CheckpointCorrupt) as refused:
        find(tmp_path, GROUPS, high_availability=True)
    assert str(refused.value) == (
        f"the checkpoints in {tmp_path} are complete for no step: for step 1 of epoch 5, "
        "ranks 1, 5 have no usable file, and no other rank held the same state"
    )


def test_files_of_another_world_size_are_refused(tmp_path: Path) -> None:
    """When there are files of a rank that the job does not have, then the error says that the files
    are of another job."""
    save(tmp_path, WORLD, 5)
    with pytest.raises(UsageError, match=r"rank_4, but this job has 4 ranks, none of them rank 4"):
        find(tmp_path, Sizes(dp=4, shards=2).replicas(), high_availability=True)
    os.mkdir(tmp_path / "rank_8")
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 5


YAML = """\
output_dir: '{root}'
load_checkpoint: '{root}/checkpoint/'
src_strategy_path_or_dir: '{root}/strategy/'
only_save_strategy: False
resume_training: {resume}
run_mode: 'train'
runner_config: {{epochs: 2, sink_mode: True, sink_size: 1}}
callbacks:
  - {{type: CheckpointMonitor, prefix: "llama2_13b", integrated_save: False, async_save: False}}
parallel:
  enable_parallel_optimizer: True
  strategy_ckpt_save_file: "./ckpt_strategy.ckpt"
  parallel_optimizer_config:
    parallel_optimizer_threshold: 64
    optimizer_weight_shard_size: 4
parallel_config: {{data_parallel: 8, model_parallel: 1, pipeline_stage: 1}}
"""


def read_yaml(root: Path, resume: object) -> Recipe:
    """Return the configuration of the guide's job, for a first or a resumed run."""
    file = root / "pretrain_llama2_13b.yaml"
    file.write_text(YAML.format(root=root, resume=resume))
    return read_recipe(file)


def test_the_guides_job_saves_and_resumes_as_documented(tmp_path: Path) -> None:
    """When the guide's job of eight ranks loses rank 1 after step 5, then ranks 0, 2, 3 and 5
    write. With the guide's environment the job resumes from these files; without it the resume is
    refused, and the error names the ranks without a file."""
    first = read_yaml(tmp_path, False)
    assert resumption(first, read({})) is None
    saving = savers(first.sizes.replicas(), gone={1})
    assert saving == (0, 2, 3, 5)
    save(first.checkpoints, saving, 5)

    again = read_yaml(tmp_path, True)
    found = resumption(again, read({"MS_ENABLE_TFT": "{TTP:1,UCE:1,ARF:1}"}))
    assert found is not None
    assert found.last
    assert sources(found) == {0: 0, 4: 0, 1: 5, 5: 5, 2: 2, 6: 2, 3: 3, 7: 3}
    for text in ("", "{TSP:1}", "{TTP:0}"):
        with pytest.raises(UsageError, match="ranks 1, 4, 6, 7 have no file of step 1 of epoch 5"):
            resumption(again, read({"MS_ENABLE_TFT": text}))


def test_ranks_resume_from_the_step_of_a_named_file(tmp_path: Path) -> None:
    """When the file of an earlier step is named, then all ranks resume from that step. A name of
    the wrong form or without a file is refused."""
    root = tmp_path / "checkpoint"
    save(root, WORLD, 4)
    save(root, WORLD, 5)
    found = resumption(read_yaml(tmp_path, "llama2_13b_rank_0-4_1.ckpt"), read({}))
    assert found is not None
    assert (found.epoch, found.passed_over) == (4, ())
    with pytest.raises(UsageError, match=r"has no file of step 1 of epoch 3 to continue from"):
        resumption(read_yaml(tmp_path, "llama2_13b_rank_0-3_1.ckpt"), read({}))
    with pytest.raises(
        UsageError, match=r"'llama.ckpt'; expected .* as llama2_13b_rank_0-5_1\.ckpt"
    ):
        resumption(read_yaml(tmp_path, "llama.ckpt"), read({}))


@settings(deadline=None)  # the time that a disk takes is not limited here
@given(
    st.dictionaries(st.sampled_from(range(4)), st.integers(1, 2), min_size=0, max_size=4),
    st.sets(st.sampled_from(WORLD)),
)
def test_all_ranks_resume_from_whole_files_of_the_newest_possible_step(
    tmp_path_factory: pytest.TempPathFactory, cuts: dict[int, int], late: set[int]
) -> None:
    """When any ranks have saved the newer step and any files are truncated, then all ranks resume
    from one step, each from a whole file of its group. It is the newest step for which this is
    possible."""
    root = tmp_path_factory.mktemp("checkpoint")
    for epoch, ranks in ((1, set(WORLD)), (2, late)):
        for rank in ranks:
            leave(root, rank, epoch)
    for rank, epoch in cuts.items():
        path = directory_of(root, rank) / f"llama2_13b_rank_{rank}-{epoch}_1.ckpt"
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])
    good = {
        epoch: {rank for rank in ranks if cuts.get(rank) != epoch}
        for epoch, ranks in ((1, set(WORLD)), (2, late))
    }
    whole = [epoch for epoch, ranks in good.items() if all(ranks & set(g) for g in GROUPS)]
    found = find(root, GROUPS, high_availability=True)
    assert found.epoch == max(whole)
    assert set(found.files) == set(WORLD)
    for rank, path in found.files.items():
        source = sources(found)[rank]
        assert any({rank, source} <= set(group) for group in GROUPS)
        assert path.read_bytes() == content(source, found.epoch)
        assert source == rank or rank not in good[found.epoch]
