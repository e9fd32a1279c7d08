"""
A user's own functions that save and load checkpoints in place of the adaptor.

The tests cover the arguments of these functions and their effect on the checkpoint.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pluggy
import pytest

from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.errors import CheckpointCorrupt, OrderRefused, UsageError
from tft.protocol.messages import ShardCopies
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.worker.saving import Own, Saving, own_functions


class Plain:
    """
    An adaptor that stores nothing beside the user's files.
    """

    @hookimpl
    def tft_save(self, directory: Path, shard: str) -> Sequence[str]:
        (directory / shard).write_bytes(b"the adaptor's")
        return (shard,)

    @hookimpl
    def tft_load(self, directory: Path, shard: str) -> None:
        assert (directory / shard).read_bytes() == b"the adaptor's"


class Careful(Plain):
    """
    An adaptor that stores its own bytes beside the user's files and gets them back at the load.
    """

    def __init__(self) -> None:
        self.back: list[tuple[str, bytes]] = []

    @hookimpl
    def tft_beside(self, shard: str) -> bytes:
        return f"the order of {shard}".encode()

    @hookimpl
    def tft_replaced(self, shard: str, beside: bytes) -> None:
        self.back.append((shard, beside))

    @hookimpl
    def tft_join(self, directory: Path) -> Sequence[str]:
        raise AssertionError("it has not written these")


class Script:
    """
    The save and load functions of a user, which note their calls.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def save(self, directory: Path, step: int) -> None:
        self.calls.append((directory.name, step))
        assert list(directory.iterdir()) == []
        (directory / "weights").write_bytes(b"%d" % step)

    def load(self, directory: Path) -> None:
        self.calls.append((directory.name, (directory / "weights").read_bytes()))

    def save_one(self, directory: Path, step: int, shard: str) -> None:
        self.calls.append((directory.name, step, shard))
        (directory / "weights").write_bytes(shard.encode())

    def load_one(self, directory: Path, *, shard: str) -> None:
        self.calls.append((directory.name, shard, (directory / "weights").read_bytes()))


def saving(adaptor: object, own: Own | None = None) -> Saving:
    """
    Return the `Saving` object of a rank with this adaptor and these functions of the user.
    """
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(adaptor)
    made = Saving(plugins.hook)
    if own is not None:
        made.give(own)
    return made


def committed(run_dir: Path, by: Saving, *shards: str) -> Path:
    """
    Save and commit a checkpoint of step 7 through `by`, and return its directory.
    """
    final = run_dir / "checkpoints" / "step-00000007"
    partial = checkpoint.partial(final)
    partial.mkdir(parents=True)
    names = [name for shard in shards for name in by.save(partial, shard, 7)]
    files = [checkpoint.digest_file(partial, name) for name in names]
    files.append(checkpoint.write_local_state(partial, 0, b"rng"))
    manifest = by.join(partial, files, step=7, world=1, adaptor="plain")
    checkpoint.commit(partial, final, manifest)
    return final


def test_save_and_load_functions_of_a_script_use_the_same_directory(tmp_path: Path) -> None:
    """When the script has its own save and load functions, then both get the same directory. The
    written files are committed and verified as usual."""
    script = Script()
    by = saving(Plain(), Own(save=script.save, load=script.load))
    final = committed(tmp_path, by, "dense")
    by.load(final, ["dense"], 0, 7)
    assert script.calls == [("dense", 7), ("dense", b"7")]
    assert {file.name for file in checkpoint.verify(final).files} == {
        "dense/weights",
        "local-state-rank0.bin",
    }
    (final / "dense" / "weights").write_bytes(b"8")
    with pytest.raises(CheckpointCorrupt, match="dense/weights differs from what was written"):
        by.load(final, ["dense"], 0, 7)


class Pointing(Plain):
    """
    An adaptor that is told which checkpoint is the newest, for a framework that keeps a pointer to
    it.
    """

    def __init__(self) -> None:
        self.told: list[tuple[Path, Path | None, int]] = []

    @hookimpl
    def tft_newest(self, directory: Path, newest: Path | None, step: int) -> None:
        self.told.append((directory, newest, step))


def test_adaptor_is_told_the_newest_checkpoint(tmp_path: Path) -> None:
    """When a checkpoint is committed or given up, then the adaptor is told which checkpoint is the
    newest, or that there is none. When nothing is given up, then the adaptor is not called."""
    pointing = Pointing()
    by = saving(pointing)
    store = CheckpointStore(directory=tmp_path / "checkpoints")
    for step in (4, 7):
        partial = checkpoint.partial(store.place(step))
        partial.mkdir(parents=True)
        files = [checkpoint.write_local_state(partial, 0, b"rng")]
        manifest = by.join(partial, files, step=step, world=1, adaptor="plain")
        by.commit(partial, store.place(step), manifest)
    for step in (7, 6, 0):
        by.give_up(store, step)
    where = store.directory
    assert pointing.told == [
        (where, store.place(4), 4),
        (where, store.place(7), 7),
        (where, store.place(4), 4),
        (where, None, 0),
    ]


class Unusual(BaseException):
    """
    An error that is not a subclass of `Exception`, as torch raises for a full disk.
    """


def test_exception_of_a_save_function_fails_only_the_save(tmp_path: Path) -> None:
    """When the save function raises something that is not an `Exception`, then the save fails with
    a `RuntimeError` that names it. A `SystemExit` is passed on."""

    def full(directory: Path, step: int) -> None:
        raise Unusual("no space\nin line 7")

    def leave(directory: Path, step: int) -> None:
        raise SystemExit(3)

    by = saving(Plain(), Own(save=full, load=print))
    with pytest.raises(RuntimeError, match=r"^full has raised Unusual: no space$"):
        by.save(tmp_path, "dense", 7)
    with pytest.raises(SystemExit):
        saving(Plain(), Own(save=leave, load=print)).save(tmp_path, "dense", 7)


def test_functions_with_a_shard_parameter_are_told_the_shard(tmp_path: Path) -> None:
    """When a rank holds several shards, then the functions are called once for each shard with its
    name. Functions without a parameter `shard` are refused."""
    script = Script()
    by = saving(Plain(), Own(save=script.save_one, load=script.load_one))
    both = [ShardCopies(shard=shard, ranks=(0, 1)) for shard in ("dense", "optimizer.0")]
    by.check(both)
    final = committed(tmp_path, by, "dense", "optimizer.0")
    by.load(final, ["optimizer.0", "dense"], 0, 7)
    assert script.calls == [
        ("dense", 7, "dense"),
        ("optimizer.0", 7, "optimizer.0"),
        ("optimizer.0", "optimizer.0", b"optimizer.0"),
        ("dense", "dense", b"dense"),
    ]
    blind = saving(Plain(), Own(save=script.save_one, load=script.load))
    blind.check(both[:1])
    with pytest.raises(
        UsageError, match="function load once for each shard: load must take a parameter `shard`"
    ):
        blind.check(both)


def test_export_is_refused_to_loops_that_cannot_write_it(tmp_path: Path) -> None:
    """When the checkpoint is to be written in the form of a framework, then this is refused before
    training, unless the loop has said that it can."""
    by = saving(Plain())
    with pytest.raises(UsageError, match="has no checkpoints of a framework"):
        by.check([], tmp_path)
    by.exports = True
    by.check([], tmp_path)


def test_state_of_the_adaptor_is_saved_beside_the_files_of_the_script(tmp_path: Path) -> None:
    """When the adaptor has state that is not part of the user's objects, then it is written beside
    the script's files and verified with them. The adaptor gets it back after the script has loaded.
    """
    script, adaptor = Script(), Careful()
    by = saving(adaptor, Own(save=script.save, load=script.load))
    final = committed(tmp_path, by, "dense")
    by.load(final, ["dense"], 0, 7)
    assert adaptor.back == [("dense", b"the order of dense")]
    (final / "dense.beside").write_bytes(b"another")
    with pytest.raises(CheckpointCorrupt, match=r"dense\.beside differs from what was written"):
        by.load(final, ["dense"], 0, 7)


class Joining(Plain):
    """
    An adaptor that joins the saved files into one.
    """

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []

    @hookimpl
    def tft_join(self, directory: Path, files: Sequence[str]) -> Sequence[str]:
        self.asked.append(files)
        (directory / "all").touch()
        return ("all",)


def test_adaptor_joins_only_the_files_of_this_attempt(tmp_path: Path) -> None:
    """When a killed attempt has left files in the directory, then the adaptor gets only the files
    of this attempt to join."""
    final = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.partial(final).mkdir(parents=True)
    (checkpoint.partial(final) / "optimizer.1").touch()
    adaptor = Joining()
    partial = checkpoint.partial(final)
    by = saving(adaptor)
    files = [checkpoint.digest_file(partial, name) for name in by.save(partial, "dense", 7)]
    manifest = by.join(partial, files, step=7, world=1, adaptor="plain")
    assert adaptor.asked == [["dense"]]
    assert [file.name for file in manifest.files] == ["all", "dense"]


def test_checkpoint_is_refused_by_the_other_kind_of_load(tmp_path: Path) -> None:
    """When a checkpoint was written by the script's functions and is read without them, or the
    reverse, then the load is refused. The error says what to do."""
    script = Script()
    own = saving(Plain(), Own(save=script.save, load=script.load))
    theirs = committed(tmp_path / "theirs", own, "dense")
    ours = committed(tmp_path / "ours", saving(Plain()), "dense")
    saving(Plain()).load(ours, ["dense"], 0, 7)
    with pytest.raises(OrderRefused, match=r"give session\.adopt that function as save"):
        saving(Plain()).load(theirs, ["dense"], 0, 7)
    with pytest.raises(OrderRefused, match=r"leave save and load out of session\.adopt"):
        own.load(ours, ["dense"], 0, 7)
    assert script.calls == [("dense", 7)]


def test_a_copy_that_fails_leaves_the_copies_of_other_shards(tmp_path: Path) -> None:
    """When the further copy of one shard cannot be written, then the copy of another shard in the
    same directory stays, because the checkpoint lists its files."""

    def write(place: Path) -> list[str]:
        (place / "dense").mkdir()
        (place / "dense" / "values").write_text("1")
        return ["dense/values"]

    def full(place: Path) -> list[str]:
        (place / "optimizer.0").mkdir()
        (place / "optimizer.0" / "values").write_text("2")
        (place / "optimizer.0.ckpt").write_text("3")
        raise OSError(28, "No space left on device")

    by = saving(Plain())
    assert by.copied(tmp_path / "copy-rank1", "dense", write) == ["copy-rank1/dense/values"]
    assert by.copied(tmp_path / "copy-rank1", "optimizer.0", full) == ()
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["copy-rank1", "dense", "values"]
    assert by.copied(tmp_path / "copy-rank2", "optimizer.0", full) == ()
    assert not (tmp_path / "copy-rank2").exists()


def nothing(directory: Path, step: int) -> None:
    """
    Save only an empty directory.
    """
    (directory / "empty").mkdir()


def a_link(directory: Path, step: int) -> None:
    """
    Save a symbolic link to a file outside the checkpoint.
    """
    (directory / "weights").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [(nothing, "has written no file under"), (a_link, "has created the symbolic link")],
)
def test_save_without_a_file_in_its_directory_fails(
    tmp_path: Path, function: Callable[[Path, int], None], sentence: str
) -> None:
    """When a save function has written no file in its directory, or has made a symbolic link there,
    then the save fails."""
    with pytest.raises(UsageError, match=sentence):
        saving(Plain(), Own(save=function, load=print)).save(tmp_path, "dense", 7)


def test_repeated_save_starts_with_an_empty_directory(tmp_path: Path) -> None:
    """When a save is repeated, then the save function finds its directory empty."""
    script = Script()
    by = saving(Plain(), Own(save=script.save, load=script.load))
    for step in (7, 8):
        assert by.save(tmp_path, "dense", step) == ["dense/weights"]
    assert (tmp_path / "dense" / "weights").read_bytes() == b"8"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"save": print}, "was given only save"),
        ({"load": print}, "was given only load"),
        (
            {"save": print, "load": "weights"},
            "the argument load of session.adopt must be a function, not a str",
        ),
        ({"save": print, "load": print, "make": print}, "takes either make, or save and load"),
    ],
)
def test_incomplete_pair_of_functions_is_refused(parts: dict[str, Any], sentence: str) -> None:
    """When `save` or `load` is missing, is not a function, or is combined with `make`, then the
    functions are refused."""
    with pytest.raises(UsageError, match=sentence):
        own_functions(parts)


def test_adaptor_saves_when_the_script_has_no_functions() -> None:
    """When a script gives no functions, then the adaptor saves and loads."""
    assert own_functions({"model": object(), "save": None}) is None
    assert not saving(Plain()).own
