"""
Last checkpoints in the layout of MindSpore Transformers: who writes them, what is believed of them, and
who goes on from which file.
"""

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
    """
    A .ckpt with one parameter.
    """
    return b"\x0a\x04" + bytes([rank % 4, epoch, 1, rank])


def writing(rank: int, epoch: int) -> Callable[[Path], object]:
    """
    What writes it.
    """
    return lambda path: path.write_bytes(content(rank, epoch))


def save(root: Path, ranks: Collection[int], epoch: int, *, noted: bool = True) -> None:
    """
    These ranks write the end of an epoch, in one run.
    """
    for rank in ranks:
        series = Series(root=root, rank=rank, prefix="llama2_13b")
        series.save(epoch, 1, writing(rank, epoch))
        if noted:
            series.note(epoch, 1)


def leave(root: Path, rank: int, epoch: int) -> None:
    """
    The same of one rank, not synced.
    """
    name = f"llama2_13b_rank_{rank}-{epoch}_1.ckpt"
    directory_of(root, rank).mkdir(exist_ok=True)
    (directory_of(root, rank) / name).write_bytes(content(rank, epoch))
    meta = {"last_epoch": epoch, "last_step": 1, "last_ckpt_file": name}
    (directory_of(root, rank) / "meta.json").write_text(json.dumps(meta))


def sources(found: Found) -> dict[int, int]:
    """
    By rank, whose file it goes on from.
    """
    return {rank: int(path.parent.name.removeprefix("rank_")) for rank, path in found.files.items()}


# ---------------------------------------------------------------- who writes


def test_the_documented_ranks_save() -> None:
    """
    When rank 1 of 8 is gone, then ranks 0, 3, 2 and 5 write the last checkpoint; with full saving all
    that are left do.
    """
    assert savers(GROUPS, gone={1}) == (0, 2, 3, 5)
    assert savers(GROUPS, gone={1}, everyone=True) == (0, 2, 3, 4, 5, 6, 7)
    assert savers(GROUPS) == (0, 1, 2, 3)


def test_nobody_saves_where_something_is_gone() -> None:
    """
    When all of a group are gone, then no complete checkpoint can be written, and it is said whose is
    lost.
    """
    with pytest.raises(
        OrderRefused, match="ranks 1, 5 are gone, and nobody else held what they did"
    ):
        savers(GROUPS, gone={1, 5, 6})


# ---------------------------------------------------------------- names


def test_the_documented_files_are_there(tmp_path: Path) -> None:
    """
    When the last checkpoint of step 5 is written after rank 1 is gone, then the files have the names of
    the documentation.
    """
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


def test_a_run_that_finds_files_gives_others_names(tmp_path: Path) -> None:
    """
    When a run begins where another has written, then its names say so; each rank counts for itself.
    """
    assert open_series(tmp_path, 0, "llama2_13b").again == 0
    save(tmp_path, [0], 5)
    again = open_series(tmp_path, 0, "llama2_13b")
    assert again.save(7, 1, writing(0, 7)).name == "llama2_13b_rank_0_1-7_1.ckpt"
    assert open_series(tmp_path, 0, "llama2_13b").again == 2
    (tmp_path / "rank_0" / "llama2_13b_rank_0-5_1.ckpt").unlink()  # as too old
    assert open_series(tmp_path, 0, "llama2_13b").again == 2
    assert open_series(tmp_path, 1, "llama2_13b").again == 0
    assert open_series(tmp_path, 0, "llama2").again == 0


@pytest.mark.parametrize("prefix", ["", "a/b", "../a", ".a"])
def test_a_prefix_is_no_path(tmp_path: Path, prefix: str) -> None:
    """
    When a prefix would lead elsewhere, or out of sight, then it is refused.
    """
    with pytest.raises(UsageError, match="is to be a name that can be seen, not a path"):
        open_series(tmp_path, 0, prefix)


# ---------------------------------------------------------------- going on


def test_a_last_checkpoint_is_gone_on_from_by_all(tmp_path: Path) -> None:
    """
    When one rank of each group has a file, then the others go on from that of their replica.
    """
    save(tmp_path, [0, 2, 3, 5], 5)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert (found.epoch, found.step, found.last) == (5, 1, True)
    assert found.written == (0, 2, 3, 5)
    assert sources(found) == {0: 0, 4: 0, 1: 5, 5: 5, 2: 2, 6: 2, 3: 3, 7: 3}


def test_a_full_checkpoint_is_gone_on_from_by_each_alone(tmp_path: Path) -> None:
    """
    When every rank has a file, then it is no last checkpoint, and each goes on from its own, whether
    high availability is on or not.
    """
    save(tmp_path, WORLD, 5)
    for on in (True, False):
        found = find(tmp_path, GROUPS, high_availability=on)
        assert not found.last
        assert sources(found) == {rank: rank for rank in WORLD}


def test_without_high_availability_a_last_checkpoint_is_refused(tmp_path: Path) -> None:
    """
    When the newest is a last checkpoint and high availability is off, then the ranks without a file are
    named, though there is an older checkpoint of all.
    """
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3, 5], 5)
    with pytest.raises(UsageError) as refused:
        find(tmp_path, GROUPS, high_availability=False)
    assert str(refused.value) == (
        f"ranks 1, 4, 6, 7 have no file of step 1 of epoch 5 in {tmp_path}: it is a last checkpoint, "
        "of which one rank of each group of replicas has a file, and is gone on from with high "
        "availability on, as by MS_ENABLE_TFT={TTP:1}"
    )


def test_what_is_not_there_of_every_group_is_passed_over(tmp_path: Path) -> None:
    """
    When a last checkpoint was cut off before a group had its file, then the one before is gone on from,
    and it is known what was passed over.
    """
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3], 5)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert (found.epoch, found.last, found.passed_over) == (4, False, ((5, 1),))
    assert sources(found) == {rank: rank for rank in WORLD}


def test_a_file_that_was_not_noted_is_not_believed(tmp_path: Path) -> None:
    """
    When a rank was killed before its `meta.json` was written, then its newest file does not count.
    """
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3], 5)
    save(tmp_path, [5], 5, noted=False)
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_a_later_run_is_not_believed_before_it_has_noted(tmp_path: Path) -> None:
    """
    When a later run was cut off before it noted what it wrote of the same step, then the file of the
    earlier one is gone on from.
    """
    save(tmp_path, WORLD, 4)
    open_series(tmp_path, 0, "llama2_13b").save(4, 1, writing(0, 4))
    found = find(tmp_path, GROUPS, high_availability=True)
    assert found.files[0].name == "llama2_13b_rank_0-4_1.ckpt"


def test_what_a_later_run_has_noted_of_the_same_step_is_taken(tmp_path: Path) -> None:
    """
    When two runs have written the same step, then it is the file of the later one that is gone on from.
    """
    for again in range(12):
        series = Series(root=tmp_path, rank=0, prefix="a", again=again)
        series.save(4, 1, writing(0, 4))
        series.note(4, 1)
    found = find(tmp_path, [(0,)], high_availability=False)
    assert found.files[0].name == "a_rank_0_11-4_1.ckpt"


def test_what_belongs_to_others_is_not_believed(tmp_path: Path) -> None:
    """
    When files of another model lie there, or `meta.json` names the file of another rank, then they do
    not count.
    """
    save(tmp_path, WORLD, 4)
    Series(root=tmp_path, rank=0, prefix="other").save(3, 1, writing(0, 3))
    found = find(tmp_path, [(0,), *((rank,) for rank in range(1, 8))], high_availability=False)
    assert (found.epoch, found.passed_over) == (4, ())
    with pytest.raises(UsageError, match="has no file of step 1 of epoch 3"):
        find(tmp_path, GROUPS, high_availability=True, only=(3, 1))

    meta = (tmp_path / "rank_1" / "meta.json").read_text()
    (tmp_path / "rank_5" / "meta.json").write_text(meta)
    assert 5 not in find(tmp_path, GROUPS, high_availability=True).written


def test_it_is_the_lowest_rank_that_the_others_go_on_from(tmp_path: Path) -> None:
    """
    When several of a group have a file, then the others go on from that of the lowest, in whatever order
    the group is given.
    """
    save(tmp_path, [1, 2], 4)
    found = find(tmp_path, [(3, 2, 0, 1)], high_availability=True)
    assert sources(found) == {0: 1, 1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("cut", [b"", content(5, 5)[:-1], b"\x00"])
def test_a_file_that_is_cut_off_is_not_believed(tmp_path: Path, cut: bytes) -> None:
    """
    When a file is empty or ends early, then it does not count, though it is noted.
    """
    save(tmp_path, WORLD, 4)
    save(tmp_path, [0, 2, 3, 5], 5)
    (tmp_path / "rank_5" / "llama2_13b_rank_5-5_1.ckpt").write_bytes(cut)
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    """
    When a rank fails as it writes, then what is there is as it was, and is gone on from.
    """
    save(tmp_path, WORLD, 4)
    before = sorted(tmp_path.rglob("*"))

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Series(root=tmp_path, rank=5, prefix="llama2_13b").save(5, 1, fail)
    assert sorted(tmp_path.rglob("*")) == before
    assert find(tmp_path, GROUPS, high_availability=True).epoch == 4


def test_a_way_that_was_left_is_not_gone_on_from(tmp_path: Path) -> None:
    """
    When a later run has begun anew and written less far, then what the earlier one wrote beyond that
    does not count.
    """
    save(tmp_path, WORLD, 100)
    for rank in WORLD:
        series = open_series(tmp_path, rank, "llama2_13b")
        series.save(5, 1, writing(rank, 5))
        series.note(5, 1)
    found = find(tmp_path, GROUPS, high_availability=False)
    assert (found.epoch, found.files[0].name) == (5, "llama2_13b_rank_0_1-5_1.ckpt")


def test_a_run_that_went_on_is_gone_on_from(tmp_path: Path) -> None:
    """
    When a job has gone on from a last checkpoint and writes another, with other ranks, then names that
    differ in the count of runs are of the same step.
    """
    save(tmp_path, [0, 2, 3, 5], 5)
    for rank in (1, 2, 3, 4):
        series = open_series(tmp_path, rank, "llama2_13b")
        assert series.again == (1 if rank in (2, 3) else 0)
        series.save(9, 1, writing(rank, 9))
        series.note(9, 1)
    found = find(tmp_path, GROUPS, high_availability=True)
    assert found.epoch == 9
    assert sources(found) == {0: 4, 4: 4, 1: 1, 5: 1, 2: 2, 6: 2, 3: 3, 7: 3}


def test_where_there_is_nothing_it_is_said_what_is_expected(tmp_path: Path) -> None:
    """
    When there is no checkpoint, or none that is noted, then it is said what is looked for.
    """
    save(tmp_path, [0], 5, noted=False)
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"has no checkpoint to go on from: expected are"):
            find(root, GROUPS, high_availability=True)


def test_where_a_group_has_lost_all_it_is_named(tmp_path: Path) -> None:
    """
    When no step is there of every group, then a group of which the newest is lost is named.
    """
    save(tmp_path, [0, 2, 3], 5)
    with pytest.raises(CheckpointCorrupt) as refused:
        find(tmp_path, GROUPS, high_availability=True)
    assert str(refused.value) == (
        f"{tmp_path} has no step of which every group has a file; of step 1 of epoch 5 there is none "
        "of ranks 1, 5, and nobody else held what they did"
    )


def test_another_world_is_refused(tmp_path: Path) -> None:
    """
    When there are files of a rank that the job does not have, then they are of another job.
    """
    save(tmp_path, WORLD, 5)
    with pytest.raises(
        UsageError, match=r"rank_4 is there, and the job has 4 ranks, none of them 4"
    ):
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
    """
    The guide's job, which begins or goes on.
    """
    file = root / "pretrain_llama2_13b.yaml"
    file.write_text(YAML.format(root=root, resume=resume))
    return read_recipe(file)


def test_the_guide_holds_from_its_file_to_its_last_checkpoint(tmp_path: Path) -> None:
    """
    When the guide's job of eight loses rank 1 after step 5, then ranks 0, 2, 3 and 5 write; with the
    guide's environment the job that is to resume goes on from these, and without it is refused with the
    ranks that have no file.
    """
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


def test_a_file_that_is_named_is_gone_on_from(tmp_path: Path) -> None:
    """
    When the file of an earlier step is named, then all go on from that step, and a name that is none, or
    that nobody has, is refused.
    """
    root = tmp_path / "checkpoint"
    save(root, WORLD, 4)
    save(root, WORLD, 5)
    found = resumption(read_yaml(tmp_path, "llama2_13b_rank_0-4_1.ckpt"), read({}))
    assert found is not None
    assert (found.epoch, found.passed_over) == (4, ())
    with pytest.raises(UsageError, match=r"has no file of step 1 of epoch 3 to go on from"):
        resumption(read_yaml(tmp_path, "llama2_13b_rank_0-3_1.ckpt"), read({}))
    with pytest.raises(
        UsageError, match=r"'llama.ckpt'; expected .* as llama2_13b_rank_0-5_1\.ckpt"
    ):
        resumption(read_yaml(tmp_path, "llama.ckpt"), read({}))


@settings(deadline=None)  # a disk takes as long as it does
@given(
    st.dictionaries(st.sampled_from(range(4)), st.integers(1, 2), min_size=0, max_size=4),
    st.sets(st.sampled_from(WORLD)),
)
def test_what_is_gone_on_from_is_whole_and_of_one_step(
    tmp_path_factory: pytest.TempPathFactory, cuts: dict[int, int], late: set[int]
) -> None:
    """
    When any ranks have saved the newer step, and files are cut in any of them, then all go on from one
    step, each from a whole file of its group, and it is the newest of which that can be said.
    """
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
