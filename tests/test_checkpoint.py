"""
A checkpoint on the disk: committed or not there, and checked before it is trusted.
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
    Where the checkpoints of these tests are.
    """
    return CheckpointStore(directory=run_dir / "checkpoints", name=name)


def write(
    run_dir: Path, step: int, content: bytes = b"weights", ranks: int = 2, name: str = NAMES[0]
) -> Path:
    """
    Everything of a checkpoint but its commit; returns its final place.
    """
    final = store(run_dir, name).place(step)
    directory = checkpoint.partial(final)
    (directory / "dense").mkdir(parents=True)
    (directory / "dense" / "weights").write_bytes(content)
    for rank in range(ranks):
        checkpoint.write_private(directory, rank, bytes([rank]))
    return final


def describe(directory: Path, step: int = 5, ranks: int = 2) -> Manifest:
    """
    The manifest of what `write` has written.
    """
    names = ["dense/weights", *(f"private-rank{rank}.bin" for rank in range(ranks))]
    files = [checkpoint.digest_file(directory, name) for name in names]
    return checkpoint.manifest(step=step, world=ranks, adaptor="pytorch", files=files)


def committed(run_dir: Path, step: int, content: bytes = b"weights", name: str = NAMES[0]) -> Path:
    """
    A whole checkpoint.
    """
    final = write(run_dir, step, content, name=name)
    directory = checkpoint.partial(final)
    checkpoint.commit(directory, final, describe(directory, step))
    return final


def test_what_was_committed_is_verified_and_read_back(tmp_path: Path) -> None:
    """
    When a checkpoint is committed, then its manifest holds, and so does each rank's own state.
    """
    final = committed(tmp_path, 5)

    assert checkpoint.verify(final) == describe(final)
    assert [checkpoint.read_private(final, rank) for rank in (0, 1)] == [b"\x00", b"\x01"]
    assert not checkpoint.partial(final).exists()


def test_the_manifest_does_not_depend_on_the_order_of_the_savers() -> None:
    """
    When the same files are reported in another order, then the manifest is the same.
    """
    files = [
        SavedFile(name=name, size=1, digest="0" * 32)
        for name in ("private-rank0.bin", "dense/.metadata", "private-rank10.bin")
    ]
    first = checkpoint.manifest(step=1, world=11, adaptor="pytorch", files=files)

    assert first == checkpoint.manifest(step=1, world=11, adaptor="pytorch", files=files[::-1])
    assert first.private == {0: "private-rank0.bin", 10: "private-rank10.bin"}


def test_a_commit_repeated_changes_nothing(tmp_path: Path) -> None:
    """
    When a commit is done again, as an order that is repeated does, then the checkpoint stays.
    """
    final = write(tmp_path, 5)
    directory = checkpoint.partial(final)
    manifest = describe(directory)
    checkpoint.commit(directory, final, manifest)
    inode = (final / checkpoint.MANIFEST).stat().st_ino

    checkpoint.commit(directory, final, manifest)

    assert (final / checkpoint.MANIFEST).stat().st_ino == inode


def test_a_commit_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    """
    When nothing was written, or something else is there already, then a commit says so.
    """
    final = committed(tmp_path, 5)
    other = checkpoint.manifest(step=5, world=3, adaptor="pytorch", files=())

    with pytest.raises(CheckpointCorrupt, match=r"\.partial is gone"):
        checkpoint.commit(checkpoint.partial(final), final, other)


def test_a_second_checkpoint_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """
    When a resumed job ends at the very step it was resumed at, then its checkpoint counts.
    """
    committed(tmp_path, 5, b"of the first run")
    final = committed(tmp_path, 5, b"of the second run")

    assert (final / "dense" / "weights").read_bytes() == b"of the second run"
    assert os.listdir(final.parent) == [final.name]
    checkpoint.verify(final)


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    """
    When there are several, then steps are compared as numbers; what was never committed and what
    is no checkpoint is passed over.
    """
    assert checkpoint.newest(store(tmp_path)) is None
    committed(tmp_path, 5)
    highest = committed(tmp_path, 100_000_000)
    write(tmp_path, 200_000_000)
    (tmp_path / "checkpoints" / "step-00000300").mkdir()

    assert checkpoint.newest(store(tmp_path)) == highest


def test_nobody_resumes_from_a_way_that_was_given_up(tmp_path: Path) -> None:
    """
    When a job goes on after an earlier step, then checkpoints of later ones are set aside, by whichever
    rank comes first, also where that has happened before.
    """
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
def test_what_another_rank_has_set_aside_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """
    When an older one that was given up is in the way, and another rank takes it away and sets the
    checkpoint aside between two calls of this one, then that stays.
    """
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


def test_what_is_no_checkpoint_of_its_step_is_not_given_up(tmp_path: Path) -> None:
    """
    When a directory has the name of a checkpoint and a manifest that is none, or of another step, then
    it is somebody else's and stays.
    """
    own = store(tmp_path)
    committed(tmp_path, 9).rename(own.place(10))
    foreign = own.place(55)
    foreign.mkdir()
    (foreign / checkpoint.MANIFEST).write_text("{}")
    checkpoint.give_up(own, 7)
    assert sorted(own.directory.iterdir()) == [own.place(10), foreign]


def test_a_rank_checks_what_it_reads(tmp_path: Path) -> None:
    """
    When a file is damaged, then who is to read it is told so, and nobody else.
    """
    final = committed(tmp_path, 5)
    (final / "private-rank1.bin").write_bytes(b"x")
    checkpoint.verify_shards(final, ["dense"], 0)
    with pytest.raises(CheckpointCorrupt, match=r"private-rank1.bin differs from what was written"):
        checkpoint.verify_shards(final, ["dense"], 1)
    (final / "dense" / "weights").write_bytes(b"weightz")
    checkpoint.verify_shards(final, ["dens"], 0)
    with pytest.raises(CheckpointCorrupt, match=r"dense/weights differs from what was written"):
        checkpoint.verify_shards(final, ["dense"], 0)


def test_a_checkpoint_on_its_way_out_counts_while_nothing_has_replaced_it(tmp_path: Path) -> None:
    """
    When a commit was cut off between its two renames, then the earlier checkpoint is still found.
    """
    final = committed(tmp_path, 5)
    replaced = final.rename(final.with_name(f"{final.name}.replaced"))

    assert checkpoint.newest(store(tmp_path)) == replaced
    assert committed(tmp_path, 5) == checkpoint.newest(store(tmp_path))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    """
    When a file was changed, shortened or removed after the commit, then `verify` names it, what
    was expected and what is there.
    """
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
    assert "cannot be read" in words if damage == "remove" else words.count("digest") == 1


def sealed(fields: str) -> str:
    """
    A manifest of these fields that names its own digest.
    """
    unsealed = f'{{"digest":"{"0" * 32}",{fields}}}'
    return unsealed.replace("0" * 32, xxhash.xxh3_128_hexdigest(unsealed.encode()), 1)


KNOWN = '"schema":2,"step":1,"world":1,"adaptor":"a"'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "cannot be understood"),
        ('{"schema": 2}', "cannot be understood"),
        ('{"schema":1,"step":1,"world":1,"adaptor":"a","files":[],"private":{}}', "schema 1"),
        (
            sealed(f'{KNOWN},"files":[{{"name":"../x","size":1,"digest":""}}],"private":{{}}'),
            "outside",
        ),
        (
            sealed(
                f'{KNOWN},"files":[],"private":{{}},'
                '"copies":[{"name":"copy-rank1/../../x","size":1,"digest":""}]'
            ),
            "outside",
        ),
        (sealed(f'{KNOWN},"files":[],"private":{{"0":"x"}}'), "among"),
        (
            sealed(f'{KNOWN},"files":[],"private":{{}}').replace('"step":1', '"step":2'),
            "differs from what was written: it does not have the digest",
        ),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    """
    When the manifest is cut off, of another schema, leads out of the checkpoint, or is not what was written, then it
    is refused with a sentence.
    """
    (tmp_path / checkpoint.MANIFEST).write_text(text)

    with pytest.raises(CheckpointCorrupt, match=complaint):
        checkpoint.verify(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_refused(tmp_path: Path) -> None:
    """
    When any one bit of the manifest differs from what was written, the checkpoint is refused: today's disks and links do
    not always say so.
    """
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
    """
    When a checkpoint was renamed or copied to the name of another step, then it is not read as one of that step.
    """
    final = committed(tmp_path, 5)
    renamed = final.rename(store(tmp_path).place(7))
    known = checkpoint.verify(renamed)
    with pytest.raises(CheckpointCorrupt, match="has the name of a checkpoint of step 7"):
        checkpoint.check_name(store(tmp_path), renamed, known)
    with pytest.raises(CheckpointCorrupt, match="holds the end of step 5, not of step 7"):
        checkpoint.verify_shards(renamed, ["dense"], 0, 7)


def test_private_state_under_the_name_of_another_rank_is_refused(tmp_path: Path) -> None:
    """
    When the files of rank-local state of two ranks have changed places, and the manifest names them so, then neither rank
    takes the generators of the other one.
    """
    for rank in (0, 1):
        checkpoint.write_private(tmp_path, rank, f"of {rank}".encode())
    (tmp_path / "private-rank0.bin").rename(tmp_path / "kept")
    (tmp_path / "private-rank1.bin").rename(tmp_path / "private-rank0.bin")
    (tmp_path / "kept").rename(tmp_path / "private-rank1.bin")
    files = [checkpoint.digest_file(tmp_path, f"private-rank{rank}.bin") for rank in (0, 1)]
    known = checkpoint.manifest(step=1, world=2, adaptor="a", files=files)
    checkpoint.commit(tmp_path, tmp_path.with_name("step-00000001"), known)
    for rank in (0, 1):
        with pytest.raises(CheckpointCorrupt, match=f"is not the rank-local state of rank {rank}"):
            checkpoint.read_private(tmp_path.with_name("step-00000001"), rank)


def test_private_state_of_a_rank_that_has_none_is_refused(tmp_path: Path) -> None:
    """
    When a rank asks for its own state in a checkpoint of fewer ranks, then it is told so.
    """
    with pytest.raises(CheckpointCorrupt, match="no rank-local state of rank 7"):
        checkpoint.read_private(committed(tmp_path, 5), 7)


def test_older_ones_are_those_that_the_same_job_could_go_on_from(tmp_path: Path) -> None:
    """
    When a job goes on from a checkpoint, then those of earlier steps are known that are of as many ranks
    and lack none, and not what was given up or is damaged to look at.
    """
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
    A checkpoint with a further copy of its shard.
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


def test_another_copy_is_read_where_one_is_damaged(tmp_path: Path) -> None:
    """
    When a shard was written twice and one of the two is damaged, then the other is read, the checkpoint
    can be gone on from, and what is damaged can be told; when both are, it is lost.
    """
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


def test_who_verifies_and_who_reads_judge_alike(tmp_path: Path) -> None:
    """
    When of a shard one file is damaged in the first copy and another in the further one, then neither
    copy can be read, and both say so.
    """
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


def test_a_damaged_copy_takes_nothing_from_a_whole_one(tmp_path: Path) -> None:
    """
    When only the further copy is damaged, then that is told, and the checkpoint is whole.
    """
    final = copied(tmp_path)
    (final / "copy-rank1" / "dense" / "weights").write_bytes(b"")
    assert checkpoint.verify_shards(final, ["dense"], 0)[1] == {"dense": final}
    checkpoint.verify(final)
    assert len(checkpoint.damaged(final)) == 1
    (final / "private-rank0.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointCorrupt, match=r"private-rank0\.bin differs from what was written"
    ):
        checkpoint.verify(final)


# ---------------------------------------------------------------- what is old


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_older_than_the_newest_whole_ones_goes(tmp_path: Path, name: str) -> None:
    """
    When checkpoints are kept to a number, then older ones go, with what was given up of steps before; a
    copy that somebody has made of one stays, and so does what lies there besides.
    """
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


def test_what_is_not_whole_takes_no_place(tmp_path: Path) -> None:
    """
    When files of a newer checkpoint are missing or cut off, then it does not count among those that are
    kept; nor does one that is newer than what all know of.
    """
    own = store(tmp_path)
    for step in (1, 2, 3, 4, 5):
        committed(tmp_path, step)
    (own.place(4) / "dense" / "weights").write_bytes(b"w")
    (own.place(3) / "dense" / "weights").unlink()

    checkpoint.retire(own, 1, 4)
    checkpoint.sweep(own)
    assert sorted(own.directory.iterdir()) == [own.place(step) for step in (2, 3, 4, 5)]


def test_what_is_going_is_out_of_sight_before_it_is_gone(tmp_path: Path) -> None:
    """
    When removing is cut off, then nothing that is half there can be taken for a checkpoint, and it is
    removed later.
    """
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


def test_all_that_is_old_goes_out_of_sight_by_renames_alone(tmp_path: Path) -> None:
    """
    When there are several old ones of a step, and an earlier removal of it was cut off, then each has a
    hidden name of its own, nothing has been removed yet, and `sweep` removes it all.
    """
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


def test_what_has_the_name_of_a_checkpoint_and_is_none_does_not_go(tmp_path: Path) -> None:
    """
    When a directory has the name of an old checkpoint and is not one of that step, then it stays.
    """
    own = store(tmp_path)
    for step in (2, 3):
        committed(tmp_path, step)
    own.place(2).rename(own.place(1))
    own.place(0).mkdir()
    checkpoint.retire(own, 1, 3)
    assert sorted(own.directory.iterdir()) == [own.place(step) for step in (0, 1, 3)]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_found_by_the_name_they_were_given(tmp_path: Path, name: str) -> None:
    """
    When a user has named them, then the newest is found, those of a way given up are set aside, and
    what was never finished is removed, under that name.
    """
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


def test_what_has_another_name_is_not_touched(tmp_path: Path) -> None:
    """
    When the directory holds other things, other jobs' checkpoints and what only looks like ours, then
    all of it stays as it is, and none of it is offered.
    """
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


def test_nothing_is_put_in_the_place_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    """
    When something of a user's own has the very name of a checkpoint, then that one is not committed: it
    is said where it is whole, and it is one when it has its name.
    """
    final = write(tmp_path, 5)
    (final / "mine").mkdir(parents=True)
    partial = checkpoint.partial(final)
    manifest = describe(partial)
    with pytest.raises(CheckpointCorrupt, match="it is not replaced") as refused:
        checkpoint.commit(partial, final, manifest)
    assert f"complete checkpoint is in {partial}: move the other one away and rename" in str(
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
def test_a_name_that_does_not_tell_steps_apart_is_refused(
    tmp_path: Path, name: str, sentence: str
) -> None:
    """
    When a name has no step in it, or not all of it, is a path or looks unfinished, then it is refused.
    """
    with pytest.raises(UsageError, match=sentence):
        store(tmp_path, name).check()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_tells_steps_apart_is_taken(tmp_path: Path, name: str) -> None:
    """
    When a name has the step in it, then it will do.
    """
    store(tmp_path, name).check()
