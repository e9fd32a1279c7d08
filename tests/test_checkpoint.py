"""
Checkpoints on a disk: committed or absent, and checked before they are used.
"""

import os
import shutil
from pathlib import Path

import pytest
import xxhash

from tft import checkpoint
from tft.checkpoint import CheckpointStore, Manifest
from tft.errors import CheckpointCorrupt, UsageError
from tft.protocol.messages import SavedFile

NAMES = ("step-{step:08d}", "{step}", "gpt7-{step}.ckpt", "a+{step:03d}")


def store(run_dir: Path, name: str = NAMES[0]) -> CheckpointStore:
    """
    Return the store of the checkpoints of these tests.
    """
    return CheckpointStore(directory=run_dir / "checkpoints", name=name)


def write(
    run_dir: Path, step: int, content: bytes = b"weights", ranks: int = 2, name: str = NAMES[0]
) -> Path:
    """
    Write a checkpoint without its commit. Return its final path.
    """
    final = store(run_dir, name).place(step)
    directory = checkpoint.partial(final)
    (directory / "dense").mkdir(parents=True)
    (directory / "dense" / "weights").write_bytes(content)
    for rank in range(ranks):
        checkpoint.write_local_state(directory, rank, bytes([rank]))
    return final


def describe(directory: Path, step: int = 5, ranks: int = 2) -> Manifest:
    """
    Return the manifest of the checkpoint that `write` has written.
    """
    names = ["dense/weights", *(f"local-state-rank{rank}.bin" for rank in range(ranks))]
    files = [checkpoint.digest_file(directory, name) for name in names]
    return checkpoint.manifest(step=step, world=ranks, adaptor="pytorch", files=files)


def committed(run_dir: Path, step: int, content: bytes = b"weights", name: str = NAMES[0]) -> Path:
    """
    Write and commit a checkpoint.
    """
    final = write(run_dir, step, content, name=name)
    directory = checkpoint.partial(final)
    checkpoint.commit(directory, final, describe(directory, step))
    return final


def test_committed_checkpoint_is_verified_and_read_back(tmp_path: Path) -> None:
    """When a checkpoint is committed, then its manifest is valid, and each rank reads its own
    rank-local state."""
    final = committed(tmp_path, 5)

    assert checkpoint.verify(final) == describe(final)
    assert [checkpoint.read_local_state(final, rank) for rank in (0, 1)] == [b"\x00", b"\x01"]
    assert not checkpoint.partial(final).exists()


def test_manifest_does_not_depend_on_the_order_of_reports() -> None:
    """When the same files are reported in another order, then the manifest is the same."""
    files = [
        SavedFile(name=name, size=1, digest="0" * 32)
        for name in ("local-state-rank0.bin", "dense/.metadata", "local-state-rank10.bin")
    ]
    first = checkpoint.manifest(step=1, world=11, adaptor="pytorch", files=files)

    assert first == checkpoint.manifest(step=1, world=11, adaptor="pytorch", files=files[::-1])
    assert first.local_state == {0: "local-state-rank0.bin", 10: "local-state-rank10.bin"}


def test_a_repeated_commit_changes_nothing(tmp_path: Path) -> None:
    """When a commit is repeated, as a repeated order requires, then the checkpoint is unchanged."""
    final = write(tmp_path, 5)
    directory = checkpoint.partial(final)
    manifest = describe(directory)
    checkpoint.commit(directory, final, manifest)
    inode = (final / checkpoint.MANIFEST).stat().st_ino

    checkpoint.commit(directory, final, manifest)

    assert (final / checkpoint.MANIFEST).stat().st_ino == inode


def test_commit_without_written_files_is_an_error(tmp_path: Path) -> None:
    """When the partial directory is missing, or another checkpoint is already in place, then the
    commit fails with a message."""
    final = committed(tmp_path, 5)
    other = checkpoint.manifest(step=5, world=3, adaptor="pytorch", files=())

    with pytest.raises(CheckpointCorrupt, match=r"\.partial no longer exists"):
        checkpoint.commit(checkpoint.partial(final), final, other)


def test_a_second_checkpoint_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    """When a second checkpoint of the same step is committed, as by a job resumed at its last step,
    then it replaces the first."""
    committed(tmp_path, 5, b"of the first run")
    final = committed(tmp_path, 5, b"of the second run")

    assert (final / "dense" / "weights").read_bytes() == b"of the second run"
    assert os.listdir(final.parent) == [final.name]
    checkpoint.verify(final)


@pytest.mark.parametrize(
    ("damages", "kept"), [(False, True), (True, False)], ids=["undamaged", "damaged"]
)
def test_checkpoint_of_more_ranks_is_not_replaced(
    tmp_path: Path, damages: bool, kept: bool
) -> None:
    """When a checkpoint of the same step is there, and the new one lacks the rank-local state of a
    lost rank, then the old one stays, and a repeated commit changes nothing. But it is replaced if
    it is damaged."""
    final = committed(tmp_path, 5, b"the state of all")
    if damages:
        (final / "dense" / "weights").write_bytes(b"the state of none")
    directory = checkpoint.partial(write(tmp_path, 5, b"the state of one", ranks=1))
    files = describe(directory, ranks=1).files
    manifest = checkpoint.manifest(step=5, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(directory, final, manifest)
    assert os.listdir(final.parent) == [final.name]
    assert checkpoint.manifest_of(final).without_local_state == ([] if kept else [1])
    if kept:
        checkpoint.commit(directory, final, manifest)
        assert (final / "dense" / "weights").read_bytes() == b"the state of all"


def test_newest_checkpoint_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    """When there are several checkpoints, then their steps are compared as numbers. Uncommitted
    directories and other directories are ignored."""
    assert checkpoint.newest(store(tmp_path)) is None
    committed(tmp_path, 5)
    highest = committed(tmp_path, 100_000_000)
    write(tmp_path, 200_000_000)
    (tmp_path / "checkpoints" / "step-00000300").mkdir()

    assert checkpoint.newest(store(tmp_path)) == highest


def test_checkpoints_of_abandoned_steps_are_set_aside(tmp_path: Path) -> None:
    """When a job continues from an earlier step, then the first rank that looks sets the
    checkpoints of later steps aside. This also holds if an earlier rollback has already set
    checkpoints of these steps aside."""
    for content in (b"one way", b"another"):
        for step in (5, 10, 15):
            committed(tmp_path, step, content)
        for _ in range(2):
            checkpoint.give_up(store(tmp_path), 7)
        newest = checkpoint.newest(store(tmp_path))
        assert newest is not None
        assert newest.name == "step-00000005"
    aside = tmp_path / "checkpoints" / "step-00000015.given-up"
    assert (aside / "dense" / "weights").read_bytes() == b"another"


@pytest.mark.parametrize("moment", ["before it looks", "while it looks"])
def test_checkpoint_set_aside_by_another_rank_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """When another rank replaces an older set-aside checkpoint by the current one between two calls
    of this rank, then the new set-aside checkpoint stays."""
    own = store(tmp_path)
    place = committed(tmp_path, 8, b"one way")
    aside = place.with_name(f"{place.name}.given-up")
    place.rename(aside)
    committed(tmp_path, 8, b"another")
    at = place if moment == "before it looks" else aside
    rename, come = Path.rename, [True]

    def meanwhile(path: Path, target: Path) -> Path:
        if path == at and come:
            come.clear()
            checkpoint.give_up(own, 7)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", meanwhile)
    checkpoint.give_up(own, 7)
    assert not come
    assert [each.name for each in own.directory.iterdir()] == [aside.name]
    assert (aside / "dense" / "weights").read_bytes() == b"another"


def test_directory_that_is_no_checkpoint_of_its_step_is_not_set_aside(tmp_path: Path) -> None:
    """When a directory is named like a checkpoint, but its manifest is invalid or of another step,
    then the directory stays unchanged."""
    own = store(tmp_path)
    committed(tmp_path, 9).rename(own.place(10))
    foreign = own.place(55)
    foreign.mkdir()
    (foreign / checkpoint.MANIFEST).write_text("{}")
    checkpoint.give_up(own, 7)
    assert sorted(own.directory.iterdir()) == [own.place(10), foreign]


def test_rank_verifies_only_the_files_that_it_reads(tmp_path: Path) -> None:
    """When a file is damaged, then a rank that reads this file gets an error, and other ranks do
    not."""
    final = committed(tmp_path, 5)
    (final / "local-state-rank1.bin").write_bytes(b"x")
    checkpoint.verify_shards(final, ["dense"], 0)
    with pytest.raises(
        CheckpointCorrupt, match=r"local-state-rank1.bin differs from what was written"
    ):
        checkpoint.verify_shards(final, ["dense"], 1)
    (final / "dense" / "weights").write_bytes(b"weightz")
    checkpoint.verify_shards(final, ["dens"], 0)
    with pytest.raises(CheckpointCorrupt, match=r"dense/weights differs from what was written"):
        checkpoint.verify_shards(final, ["dense"], 0)


def test_earlier_checkpoint_is_found_when_its_replacement_was_interrupted(tmp_path: Path) -> None:
    """When a commit was interrupted between its two renames, then the earlier checkpoint is still
    found."""
    final = committed(tmp_path, 5)
    replaced = final.rename(final.with_name(f"{final.name}.replaced"))

    assert checkpoint.newest(store(tmp_path)) == replaced
    assert committed(tmp_path, 5) == checkpoint.newest(store(tmp_path))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_each_damaged_file(tmp_path: Path, damage: str) -> None:
    """When a file was changed, shortened or removed after the commit, then `verify` names the file,
    the expected content and the found content."""
    final = committed(tmp_path, 5)
    victim = final / "dense" / "weights"
    match damage:
        case "flip":
            victim.write_bytes(b"weighus")
        case "cut":
            victim.write_bytes(b"weight")
        case _:
            victim.unlink()

    with pytest.raises(CheckpointCorrupt) as refused:
        checkpoint.verify(final)

    words = str(refused.value)
    assert "dense/weights" in words
    assert "cannot be read" in words if damage == "remove" else words.count("with digest") == 2


def sealed(fields: str) -> str:
    """
    Return a manifest with these fields and its own digest.
    """
    unsealed = f'{{"digest":"{"0" * 32}",{fields}}}'
    return unsealed.replace("0" * 32, xxhash.xxh3_128_hexdigest(unsealed.encode()), 1)


KNOWN = '"schema":4,"step":1,"world":1,"adaptor":"a"'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a valid checkpoint manifest"),
        ('{"schema": 4}', "is not a valid checkpoint manifest"),
        ('{"schema":3,"step":1,"world":1,"adaptor":"a","files":[],"local_state":{}}', "schema 3"),
        (
            sealed(f'{KNOWN},"files":[{{"name":"../x","size":1,"digest":""}}],"local_state":{{}}'),
            "outside",
        ),
        (
            sealed(
                f'{KNOWN},"files":[],"local_state":{{}},'
                '"copies":[{"name":"copy-rank1/../../x","size":1,"digest":""}]'
            ),
            "outside",
        ),
        (sealed(f'{KNOWN},"files":[],"local_state":{{"0":"x"}}'), "missing from its list"),
        (
            sealed(f'{KNOWN},"files":[],"local_state":{{}}').replace('"step":1', '"step":2'),
            "differs from what was written: it does not have the digest",
        ),
    ],
)
def test_invalid_manifest_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """When the manifest is truncated, has another schema, names files outside the checkpoint, or
    differs from the written one, then it is refused with a message."""
    (tmp_path / checkpoint.MANIFEST).write_text(text)

    with pytest.raises(CheckpointCorrupt, match=complaint):
        checkpoint.verify(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_refused(tmp_path: Path) -> None:
    """When any one bit of the manifest differs from the written bit, then the checkpoint is
    refused, because disks and links do not always report an error."""
    final = committed(tmp_path, 5)
    path = final / checkpoint.MANIFEST
    written = path.read_bytes()
    checkpoint.verify(final)
    for place in range(8 * len(written)):
        flipped = bytearray(written)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointCorrupt):
            checkpoint.manifest_of(final)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """When a checkpoint was renamed or copied to the name of another step, then it is refused as a
    checkpoint of that step."""
    final = committed(tmp_path, 5)
    renamed = final.rename(store(tmp_path).place(7))
    known = checkpoint.verify(renamed)
    with pytest.raises(CheckpointCorrupt, match="says step 7"):
        checkpoint.check_name(store(tmp_path), renamed, known)
    with pytest.raises(CheckpointCorrupt, match="at the end of step 5, not of step 7"):
        checkpoint.verify_shards(renamed, ["dense"], 0, 7)


def test_rank_local_state_under_the_name_of_another_rank_is_refused(tmp_path: Path) -> None:
    """When the rank-local state files of two ranks are exchanged, also in the manifest, then
    neither rank loads the random generators of the other."""
    for rank in (0, 1):
        checkpoint.write_local_state(tmp_path, rank, f"of {rank}".encode())
    (tmp_path / "local-state-rank0.bin").rename(tmp_path / "kept")
    (tmp_path / "local-state-rank1.bin").rename(tmp_path / "local-state-rank0.bin")
    (tmp_path / "kept").rename(tmp_path / "local-state-rank1.bin")
    files = [checkpoint.digest_file(tmp_path, f"local-state-rank{rank}.bin") for rank in (0, 1)]
    known = checkpoint.manifest(step=1, world=2, adaptor="a", files=files)
    checkpoint.commit(tmp_path, tmp_path.with_name("step-00000001"), known)
    for rank in (0, 1):
        with pytest.raises(CheckpointCorrupt, match=f"is not the rank-local state of rank {rank}"):
            checkpoint.read_local_state(tmp_path.with_name("step-00000001"), rank)


def test_reading_rank_local_state_of_a_missing_rank_is_refused(tmp_path: Path) -> None:
    """When a rank asks for its own state in a checkpoint of fewer ranks, then this is refused with
    a message."""
    with pytest.raises(CheckpointCorrupt, match="no rank-local state of rank 7"):
        checkpoint.read_local_state(committed(tmp_path, 5), 7)


def test_older_checkpoints_are_those_that_the_job_can_resume_from(tmp_path: Path) -> None:
    """When older checkpoints are listed, then they are of earlier steps, as many ranks, and no
    missing shards. Set-aside checkpoints and those with damaged manifests are not listed."""
    own = store(tmp_path)
    places = {step: committed(tmp_path, step) for step in (1, 2, 3, 4, 5, 6)}
    (places[2] / checkpoint.MANIFEST).write_text("{")
    places[3].rename(places[3].with_name(f"{places[3].name}.given-up"))
    shutil.copytree(places[4], places[4].with_name(f"{places[4].name}.replaced"))
    alone = write(tmp_path, 7, ranks=1)
    checkpoint.commit(checkpoint.partial(alone), alone, describe(checkpoint.partial(alone), 7, 1))
    lacking = write(tmp_path, 8)
    files = describe(checkpoint.partial(lacking), 8).files[:-1]
    part = checkpoint.manifest(step=8, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(checkpoint.partial(lacking), lacking, part)

    newest = checkpoint.manifest(step=9, world=2, adaptor="pytorch", files=())
    assert checkpoint.older(own, newest) == [(str(places[step]), step) for step in (6, 5, 4, 1)]
    assert checkpoint.older(own, checkpoint.verify(places[5])) == [
        (str(places[step]), step) for step in (4, 1)
    ]


def copied(run_dir: Path) -> Path:
    """
    Write a checkpoint with a further copy of its shard.
    """
    final = write(run_dir, 5)
    directory = checkpoint.partial(final)
    further = checkpoint.copy_of(directory, 1) / "dense"
    further.mkdir(parents=True)
    (further / "weights").write_bytes(b"weights")
    files = [
        *describe(directory).files,
        checkpoint.digest_file(directory, "copy-rank1/dense/weights"),
    ]
    manifest = checkpoint.manifest(step=5, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(directory, final, manifest)
    return final


def test_whole_copy_of_a_shard_is_read_when_the_other_is_damaged(tmp_path: Path) -> None:
    """When one of two copies of a shard is damaged, then the other is read, and the damage is
    reported. When both are damaged, the checkpoint is refused."""
    final = copied(tmp_path)
    known, places = checkpoint.verify_shards(final, ["dense"], 0)
    assert places == {"dense": final}
    assert [file.name for file in known.copies] == ["copy-rank1/dense/weights"]
    assert checkpoint.damaged(final) == []

    (final / "dense" / "weights").write_bytes(b"weightz")
    assert checkpoint.verify_shards(final, ["dense"], 0)[1] == {"dense": final / "copy-rank1"}
    assert checkpoint.verify(final) == known
    (why,) = checkpoint.damaged(final)
    assert "dense/weights differs from what was written" in why

    (final / "copy-rank1" / "dense" / "weights").unlink()
    assert len(checkpoint.damaged(final)) == 2
    with pytest.raises(CheckpointCorrupt, match="dense/weights differs from what was written"):
        checkpoint.verify_shards(final, ["dense"], 0)
    with pytest.raises(CheckpointCorrupt, match="dense/weights differs from what was written"):
        checkpoint.verify(final)


def test_verify_and_read_refuse_a_shard_with_a_damaged_file_in_each_copy(tmp_path: Path) -> None:
    """When each of two copies of a shard has a different damaged file, then neither is read, and
    `verify` and `verify_shards` both refuse the checkpoint."""
    final = write(tmp_path, 5)
    directory = checkpoint.partial(final)
    for place in (directory, checkpoint.copy_of(directory, 1)):
        (place / "dense").mkdir(parents=True, exist_ok=True)
        (place / "dense" / "weights").write_bytes(b"weights")
        (place / "dense.beside").write_bytes(b"order")
    names = ["dense.beside", "copy-rank1/dense/weights", "copy-rank1/dense.beside"]
    files = [
        *describe(directory).files,
        *(checkpoint.digest_file(directory, name) for name in names),
    ]
    manifest = checkpoint.manifest(step=5, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(directory, final, manifest)

    (final / "dense" / "weights").write_bytes(b"weightz")
    assert checkpoint.verify(final) == manifest
    checkpoint.verify_shards(final, ["dense"], 0)
    (final / "copy-rank1" / "dense.beside").write_bytes(b"odder")
    with pytest.raises(CheckpointCorrupt, match="dense/weights differs from what was written"):
        checkpoint.verify_shards(final, ["dense"], 0)
    with pytest.raises(CheckpointCorrupt, match="dense/weights differs from what was written"):
        checkpoint.verify(final)


def test_checkpoint_is_whole_when_only_a_further_copy_is_damaged(tmp_path: Path) -> None:
    """When only the further copy of a shard is damaged, then the damage is reported, and the
    checkpoint counts as whole."""
    final = copied(tmp_path)
    (final / "copy-rank1" / "dense" / "weights").write_bytes(b"")
    assert checkpoint.verify_shards(final, ["dense"], 0)[1] == {"dense": final}
    checkpoint.verify(final)
    assert len(checkpoint.damaged(final)) == 1
    (final / "local-state-rank0.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointCorrupt, match=r"local-state-rank0\.bin differs from what was written"
    ):
        checkpoint.verify(final)


# ---------------------------------------------------------------- old checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_only_checkpoints_older_than_the_newest_whole_ones_are_removed(
    tmp_path: Path, name: str
) -> None:
    """When only a number of checkpoints is to be kept, then older ones and set-aside ones of
    earlier steps are removed. A user's copy and other files stay."""
    own = store(tmp_path, name)
    for step in (1, 2, 3, 4, 5):
        committed(tmp_path, step, name=name)
    kept = own.place(1).with_name(f"{own.place(1).name}.mine")
    shutil.copytree(own.place(1), kept)
    for step, mark in ((1, ".given-up"), (4, ".given-up")):
        committed(tmp_path, step, name=name)
        own.place(step).rename(own.place(step).with_name(own.place(step).name + mark))
    (own.directory / "notes").touch()

    checkpoint.retire(own, 0, 5)
    checkpoint.retire(own, 9, 5)
    assert len(list(own.directory.iterdir())) == 7
    checkpoint.retire(own, 2, 5)
    checkpoint.sweep(own)
    assert {each.name for each in own.directory.iterdir()} == {
        "notes", kept.name, f"{own.place(4).name}.given-up", own.place(3).name, own.place(5).name,
    }  # fmt: skip


def test_incomplete_checkpoints_do_not_count_among_the_kept_ones(tmp_path: Path) -> None:
    """When files of a newer checkpoint are missing or truncated, then it does not count among the
    kept ones. A checkpoint newer than the given step does not count either."""
    own = store(tmp_path)
    for step in (1, 2, 3, 4, 5):
        committed(tmp_path, step)
    (own.place(4) / "dense" / "weights").write_bytes(b"w")
    (own.place(3) / "dense" / "weights").unlink()

    checkpoint.retire(own, 1, 4)
    checkpoint.sweep(own)
    assert sorted(own.directory.iterdir()) == [own.place(step) for step in (2, 3, 4, 5)]


def test_checkpoint_is_hidden_before_it_is_removed(tmp_path: Path) -> None:
    """When a removal is interrupted, then no partly removed directory counts as a checkpoint, and
    `sweep` removes it later."""
    own = store(tmp_path)
    for step in (1, 2):
        committed(tmp_path, step)
    checkpoint.retire(own, 1, 2)
    (hidden,) = own.directory.glob(".step-00000001.*.removed")
    assert {each.name for each in own.directory.iterdir()} == {
        hidden.name,
        "step-00000002",
    }
    assert checkpoint.newest(own) == own.place(2)
    checkpoint.sweep(own, 1)
    assert [each.name for each in own.directory.iterdir()] == ["step-00000002"]


def test_old_checkpoints_are_hidden_by_renames_only(tmp_path: Path) -> None:
    """When a step has several old checkpoints, one from an interrupted removal, then each gets its
    own hidden name, and no file is removed yet. `sweep` removes all of them."""
    own = store(tmp_path)
    for mark in (".given-up", ".replaced", ""):
        committed(tmp_path, 1, mark.encode()).rename(tmp_path / f"one{mark}")
    for mark in (".given-up", ".replaced", ""):
        (tmp_path / f"one{mark}").rename(f"{own.place(1)}{mark}")
    committed(tmp_path, 2)
    checkpoint.retire(own, 1, 2)
    committed(tmp_path, 1, b"anew")
    checkpoint.retire(own, 1, 2)

    hidden = [each for each in own.directory.iterdir() if each.name.startswith(".")]
    contents = sorted((each / "dense" / "weights").read_bytes() for each in hidden)
    assert contents == [b"", b".given-up", b".replaced", b"anew"]
    checkpoint.sweep(own)
    assert list(own.directory.iterdir()) == [own.place(2)]


def test_directory_that_is_not_a_checkpoint_of_its_step_is_not_removed(tmp_path: Path) -> None:
    """When a directory has the name of an old checkpoint and is not a checkpoint of that step, then
    it stays."""
    own = store(tmp_path)
    for step in (2, 3):
        committed(tmp_path, step)
    own.place(2).rename(own.place(1))
    own.place(0).mkdir()
    checkpoint.retire(own, 1, 3)
    assert sorted(own.directory.iterdir()) == [own.place(step) for step in (0, 1, 3)]


# ---------------------------------------------------------------- names of checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_found_by_their_configured_name(tmp_path: Path, name: str) -> None:
    """When the user has chosen the name, then the newest checkpoint is found, abandoned ones are
    set aside, and unfinished ones are removed, under that name."""
    own = store(tmp_path, name)
    for step in (9, 10, 100_000_000):
        committed(tmp_path, step, name=name)
    assert checkpoint.newest(own) == own.place(100_000_000)
    checkpoint.give_up(own, 9)
    assert checkpoint.newest(own) == own.place(9)
    begun = [checkpoint.open_round(own.place(step), 0, 0) for step in (9, 10)]
    checkpoint.sweep(own, 9)
    assert [each.exists() for each in begun] == [False, True]
    checkpoint.sweep(own)
    assert {each.name for each in own.directory.iterdir()} == {
        own.place(9).name,
        *(f"{own.place(step).name}.given-up" for step in (10, 100_000_000)),
    }


def test_files_with_other_names_are_not_touched(tmp_path: Path) -> None:
    """When the directory has other files, checkpoints of other jobs and similar names, then all of
    them stay unchanged, and none is offered as the newest checkpoint."""
    own = store(tmp_path)
    committed(tmp_path, 9, name="other-{step:08d}")
    committed(tmp_path, 9, name="{step}")
    rounds = checkpoint.open_round(store(tmp_path, "{step}").place(8), 0, 0)
    for name in ("step-9", "step-00000009.old", "step-00000009", "step-0000000٩", "notes"):
        (own.directory / name).mkdir()
        (own.directory / name / "data").touch()
    (own.directory / "step-00000008").touch()
    before = sorted(own.directory.rglob("*"))

    assert checkpoint.newest(own) is None
    checkpoint.give_up(own, 0)
    checkpoint.sweep(own)
    assert sorted(own.directory.rglob("*")) == before
    assert rounds.exists()


def test_commit_does_not_replace_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    """When a user's directory has the name of a checkpoint, then the commit fails and names the
    complete checkpoint's path. If the user renames the complete checkpoint, it is valid."""
    final = write(tmp_path, 5)
    (final / "mine").mkdir(parents=True)
    partial = checkpoint.partial(final)
    manifest = describe(partial)
    with pytest.raises(CheckpointCorrupt, match="so tft does not replace it") as refused:
        checkpoint.commit(partial, final, manifest)
    assert f"the complete new checkpoint is in {partial}: move {final.name} away" in str(
        refused.value
    )
    assert (final / "mine").exists()
    final.rename(tmp_path / "mine")
    partial.rename(final)
    assert checkpoint.verify(final) == manifest


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("checkpoint", "must contain the step once"),
        ("{step}-{step}", "must contain the step once"),
        ("{step:.2}", "must contain the step once"),
        ("{step:g}", "must contain the step once"),
        ("{step!r}", "must contain the step once"),
        ("{epoch}-{step}", "must contain the step once"),
        ("{{{step}}}", "must contain the step once"),
        ("a/{step}", "not a path"),
        ("../{step}", "not a path"),
        (".{step}", "not a path"),
        ("{step}.partial", "must not end in one of"),
        ("{step}-x.given-up", "must not end in one of"),
        ("{step}.removed", "must not end in one of"),
    ],
)
def test_checkpoint_name_without_a_unique_step_is_refused(
    tmp_path: Path, name: str, sentence: str
) -> None:
    """When a name has no step or only a part of the step, is a path or looks unfinished, then it is
    refused."""
    with pytest.raises(UsageError, match=sentence):
        store(tmp_path, name).check()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_name_with_the_step_is_accepted(tmp_path: Path, name: str) -> None:
    """When a name contains the step, then it is accepted."""
    store(tmp_path, name).check()
