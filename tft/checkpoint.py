"""
A checkpoint on the disk: its directory, the manifest that makes it one, and the private state
of each rank. Knows no framework: what an adaptor writes is a list of files to it.

    RUN_DIR/checkpoints/step-00000042/           manifest.json, private-rank0.bin, …, the adaptor's
    RUN_DIR/checkpoints/step-00000042.partial/   being written, or never finished
    RUN_DIR/checkpoints/step-00000042.round-3.1.partial/  the same of a periodic one, see `open_round`
    RUN_DIR/checkpoints/step-00000042.given-up/  of a way that the job has turned back from
    RUN_DIR/checkpoints/step-00000042.replaced/  an earlier one of the same step, on its way out

A directory is a checkpoint when it has its final name, and it gets that name, by one rename, when
every file in it is synced. Whoever reads it checks the files against the manifest first.
"""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from tft.errors import CheckpointCorrupt
from tft.protocol.messages import SavedFile

SCHEMA = 1
"""Of the manifest; a reader refuses another one."""

MANIFEST = "manifest.json"

_BLOCK = 4 * 2**20
"""Bytes read at a time to digest a file: few calls, and nothing beside the state they belong to."""

_FINAL = re.compile(r"step-(\d{8,})(\.replaced)?")
_ROUND = re.compile(r"step-(\d{8,})\.round-\d+\.\d+\.partial")
_CLAIMED = "claimed.json"
_PRIVATE = re.compile(r"private-rank(\d+)\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """
    What belongs to a checkpoint.
    """

    schema: int
    step: int
    """The step whose end it holds."""
    world: int
    adaptor: str
    """Who can read its files."""
    files: tuple[SavedFile, ...]
    """All but the manifest itself."""
    private: dict[int, str]
    """By rank, the file with its private state."""

    @property
    def bereft(self) -> list[int]:
        """
        The ranks whose private state was lost with their node.
        """
        return sorted(set(range(self.world)) - set(self.private))


# ---------------------------------------------------------------- writing


def place(run_dir: Path, step: int) -> Path:
    """
    Of the checkpoint of a step.
    """
    return run_dir / "checkpoints" / f"step-{step:08d}"


def partial(final: Path) -> Path:
    """
    Where a checkpoint is written until it is complete.
    """
    return final.with_name(f"{final.name}.partial")


def digest_file(directory: Path, name: str) -> SavedFile:
    """
    The file `name`, relative to `directory`, as it is now.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with (directory / name).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return SavedFile(name=name, size=size, digest=digest.hexdigest())


def write_private(directory: Path, rank: int, private: bytes) -> SavedFile:
    """
    Write the private state of a rank, synced.
    """
    name = f"private-rank{rank}.bin"
    _write(directory / name, private)
    return digest_file(directory, name)


def open_round(final: Path, incident: int, number: int) -> Path:
    """
    Where the ranks write their parts of a periodic checkpoint, each on its own. Those that were copied
    after the same order to go on, that of a round of an incident, belong together.
    """
    directory = final.with_name(f"{final.name}.round-{incident}.{number}.partial")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def write_part(directory: Path, rank: int, files: Sequence[SavedFile]) -> None:
    """
    Note that a rank has written its part, and which files that is.
    """
    beside = directory / f"{_part(rank)}.partial"
    _write(beside, msgspec.json.encode(files))
    beside.rename(directory / _part(rank))  # so that it is not read by halves


def claim_parts(directory: Path, world: int) -> list[SavedFile] | None:
    """
    The files of all ranks, for the one caller who is to commit them; None for all others, and
    while any part is missing.
    """
    parts = [directory / _part(rank) for rank in range(world)]
    if not all(part.exists() for part in parts):
        return None
    try:
        parts[0].rename(directory / _CLAIMED)
    except FileNotFoundError:  # another was faster
        return None
    parts[0] = directory / _CLAIMED
    encoded = [part.read_bytes() for part in parts]
    for part in parts:
        part.unlink()
    return [file for part in encoded for file in msgspec.json.decode(part, type=list[SavedFile])]


def give_up(run_dir: Path, step: int) -> None:
    """
    The job goes on after `step` and may come another way: checkpoints of later steps are set aside, so
    that nobody resumes from them. Every rank may do it, at once.
    """
    for place in (run_dir / "checkpoints").glob("step-*"):
        match = _FINAL.fullmatch(place.name)
        if match is None or int(match[1]) <= step:
            continue
        aside = place.with_name(f"step-{match[1]}.given-up")
        with suppress(FileNotFoundError):  # another rank was faster
            shutil.rmtree(aside, ignore_errors=True)
            place.rename(aside)


def sweep(run_dir: Path, step: int | None = None) -> None:
    """
    Remove what was begun of periodic checkpoints up to `step`, or of all, and never finished.
    """
    for directory in (run_dir / "checkpoints").glob("step-*"):
        match = _ROUND.fullmatch(directory.name)
        if match is not None and (step is None or int(match[1]) <= step):
            shutil.rmtree(directory, ignore_errors=True)


def _part(rank: int) -> str:
    return f"part-rank{rank}.json"


def manifest(*, step: int, world: int, adaptor: str, files: Sequence[SavedFile]) -> Manifest:
    """
    The manifest of a checkpoint of these files. Its content does not depend on their order.
    """
    ordered = tuple(sorted(files, key=lambda file: file.name))
    return Manifest(
        schema=SCHEMA,
        step=step,
        world=world,
        adaptor=adaptor,
        files=ordered,
        private={
            int(match[1]): file.name for file in ordered if (match := _PRIVATE.fullmatch(file.name))
        },
    )


def commit(partial: Path, final: Path, manifest: Manifest) -> None:
    """
    Make what lies in `partial` the checkpoint `final`. Done again after it was done, it changes
    nothing. An earlier checkpoint of that name, from before the job was resumed, is replaced.
    """
    if not partial.exists():
        if _committed(final) == manifest:
            return
        raise CheckpointCorrupt(f"{partial} is gone, and {final} is not the checkpoint it was for")
    _write(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    for directory in {(partial / file.name).parent for file in manifest.files} | {partial}:
        _sync_directory(directory)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)  # no rename takes the place of a directory; `newest` knows this one
    partial.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _committed(final: Path) -> Manifest | None:
    try:
        return _read_manifest(final)
    except CheckpointCorrupt:
        return None


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- reading


def newest(run_dir: Path) -> Path | None:
    """
    The committed checkpoint of the highest step in a run directory, unread; None if there is none.
    """
    return next(iter(committed(run_dir)), None)


def committed(run_dir: Path) -> list[Path]:
    """
    The committed checkpoints in a run directory, that of the highest step first, unread.
    """
    found: list[tuple[int, bool, Path]] = []
    for directory in (run_dir / "checkpoints").glob("step-*"):
        match = _FINAL.fullmatch(directory.name)
        if match is not None and (directory / MANIFEST).is_file():
            found.append((int(match[1]), match[2] is None, directory))
    return [directory for _, _, directory in sorted(found, reverse=True)]


def manifest_of(directory: Path) -> Manifest:
    """
    The manifest of a checkpoint, whose files are not looked at. Raises `CheckpointCorrupt` where it
    cannot be read.
    """
    return _read_manifest(directory)


def verify(directory: Path) -> Manifest:
    """
    The manifest of a checkpoint, every file of which is as it was written. Raises
    `CheckpointCorrupt` naming the first that is not.
    """
    known = _read_manifest(directory)
    for file in known.files:
        _verify_file(directory, file)
    return known


def _verify_file(directory: Path, file: SavedFile) -> None:
    try:
        found = digest_file(directory, file.name)
    except OSError as error:
        raise CheckpointCorrupt(
            f"{directory}: {file.name}, of {file.size} bytes, cannot be read: {error.strerror}"
        ) from None
    if found != file:
        raise CheckpointCorrupt(
            f"{directory}: {file.name} is not what was written: expected {file.size} bytes "
            f"with digest {file.digest}, found {found.size} with {found.digest}"
        )


def verify_shards(directory: Path, shards: Sequence[str], rank: int) -> None:
    """
    Check what a rank is about to read: the files of these shards, which begin with the shard's name,
    and its private state. Raises `CheckpointCorrupt`.
    """
    known = _read_manifest(directory)
    starts = tuple(f"{shard}{end}" for shard in shards for end in ("/", "."))
    own = {known.private.get(rank)}
    for file in known.files:
        if file.name in own or file.name.startswith(starts):
            _verify_file(directory, file)


def read_private(directory: Path, rank: int) -> bytes:
    """
    The private state of a rank.
    """
    name = _read_manifest(directory).private.get(rank)
    if name is None:
        raise CheckpointCorrupt(f"{directory} holds no private state of rank {rank}")
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(f"{directory}: {name} cannot be read: {error.strerror}") from None


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointCorrupt(
            f"{directory} has no {MANIFEST} that can be read: {error.strerror}"
        ) from None
    except msgspec.DecodeError as error:
        raise CheckpointCorrupt(f"{path} cannot be understood: {error}") from None
    if known.schema != SCHEMA:
        raise CheckpointCorrupt(f"{path} has schema {known.schema}; schema {SCHEMA} is known here")
    names = [file.name for file in known.files]
    for name in [*names, *known.private.values()]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointCorrupt(f"{path} names {name!r}, which is outside the checkpoint")
    if not set(known.private.values()) <= set(names):
        raise CheckpointCorrupt(f"{path} names private state that is not among its files")
    return known
