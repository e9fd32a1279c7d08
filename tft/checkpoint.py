"""
Checkpoints on the disk: the directory, the manifest (the list of the checkpoint's files), and the
rank-local state of each rank. This module does not depend on a framework: of a file that an adaptor
has written, it knows only the name, the size and the digest.

    step-00000042/           a checkpoint: manifest.json, local-state-rank0.bin, …, the adaptor's files
    step-00000042.partial/   a checkpoint that is being written, or was never finished
    step-00000042.round-3.1.partial/  a periodic checkpoint that is being written, see `round_of`
    step-00000042.given-up/  a checkpoint that must not be used: the job has gone back to an
                             earlier step and may reach another state at step 42
    step-00000042.replaced/  an earlier checkpoint of the same step, which is being removed
    .step-00000042.0a1b2c3d.removed/  an old checkpoint that is being removed

A directory counts as a checkpoint only when it has its final name. The directory gets that name by
one rename, after every file in it is synced to the disk. A reader first checks the files against
the manifest.

A job writes all its checkpoints to one directory, with names of one pattern (`CheckpointStore`).
The directory may also contain other files: an entry whose name does not fit the pattern is never
changed.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from tft.config import CHECKPOINT_NAME, JobSettings, RankSettings
from tft.errors import CheckpointCorrupt, UsageError
from tft.files import sync
from tft.protocol.messages import SavedFile

SCHEMA = 4
"""The version of the format of the manifest and of the rank-local state. A reader refuses other
versions."""

_UNSEALED = "0" * 32
"""The text that stands in the place of the manifest's own digest while that digest is computed."""

MANIFEST = "manifest.json"

_BLOCK = 4 * 2**20
"""The number of bytes that are read at a time when a file is digested. Larger blocks would save
little time; smaller blocks would need many system calls."""

_REPLACED = ".replaced"
_GIVEN_UP = ".given-up"
_PARTIAL = ".partial"
_REMOVED = ".removed"
_MARKS = (_REPLACED, _GIVEN_UP, _PARTIAL, _REMOVED)
"""The suffixes of directories that are not finished checkpoints, must not be used, or will be
removed soon."""
_ROUND = re.compile(r"\.round-[0-9]+\.[0-9]+\.partial")
_GOING = re.compile(rf"({re.escape(_REPLACED)}|{re.escape(_GIVEN_UP)})?\.[0-9a-f]{{8}}\.removed")

_NAME = re.compile(r"(?P<before>[^{}]*)\{step(:0[1-9][0-9]?d)?\}(?P<behind>[^{}]*)")
_CLAIMED = "claimed.json"
BESIDE = ".beside"
"""The suffix of a file that tft adds to a shard which the script's own save function writes. The
file has the part of the shard's state that is not in the user's objects (adaptor hook
`tft_beside`). Its name is the name of the shard with this suffix."""
_LOCAL_STATE = re.compile(r"local-state-rank(\d+)\.bin")
_OWNER = "tft rank-local state of rank {}\n"
"""The first line of a file with rank-local state. It names the rank, so that a rank refuses the
file of another rank."""
_COPY = re.compile(r"(copy-rank\d+)/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """
    The list of all files of a checkpoint, and the facts that a reader of the checkpoint needs.
    """

    digest: str
    """The digest of the manifest file itself, computed with zeros in the place of this field. This
    must be the first field: to check the digest, a reader puts zeros in the first place where the
    text of the digest occurs in the file."""
    schema: int
    step: int
    """The step at whose end the state was saved."""
    world: int
    adaptor: str
    """The name of the adaptor that can read the files."""
    files: tuple[SavedFile, ...]
    """All files except the manifest itself and the files in `copies`."""
    local_state: dict[int, str]
    """For each rank, the name of the file with its rank-local state."""
    own: bool = False
    """True if the script's own save function wrote the files of the shards. False if the adaptor
    wrote them."""
    copies: tuple[SavedFile, ...] = ()
    """The files of additional copies of shards (option `--save-copies all`). Each file is in a
    subdirectory for the rank that wrote the copy (see `copy_of`)."""

    @property
    def without_local_state(self) -> list[int]:
        """
        The ranks whose rank-local state is not in the checkpoint, because it was lost with their
        node.
        """
        return sorted(set(range(self.world)) - set(self.local_state))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    """
    The part of a manifest that is the same in all versions of the manifest's format.
    """

    schema: int


# ---------------------------------------------------------------- names


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """
    The directory in which a job writes its checkpoints, and the names of the checkpoints.
    """

    directory: Path
    name: str = CHECKPOINT_NAME
    """The pattern of the directory names. It contains `{step}`."""

    def check(self) -> None:
        """
        Check the pattern of the names. Raises `UsageError` when the pattern could give two steps
        the same name, or is not a plain file name. Also raises `UsageError` when a name could be
        taken for the name of an unfinished, abandoned or removed checkpoint.
        """
        name = self.name
        match = _NAME.fullmatch(name)
        if match is None:
            raise UsageError(
                f"--checkpoint-name {name!r} must contain the step once, as {{step}} or, with "
                "zeros before it, {step:08d}, and no other braces"
            )
        if "/" in name or "\0" in name or name.startswith("."):
            raise UsageError(
                f"--checkpoint-name {name!r} must be a name that does not begin with a dot, and "
                "not a path: --checkpoint-dir says where checkpoints are"
            )
        if match["behind"].endswith(_MARKS):
            raise UsageError(
                f"--checkpoint-name {name!r} must not end in one of {', '.join(_MARKS)}: tft "
                "marks unfinished and abandoned checkpoints with these"
            )

    def place(self, step: int) -> Path:
        """
        Return the final path of the checkpoint of a step.
        """
        return self.directory / self.name.format(step=step)

    def step_of(self, directory: Path) -> int | None:
        """
        Return the step in the name of a directory of this store. Return None if the directory does
        not exist, or if its name does not fit the pattern of checkpoint names (see `held`).
        """
        return next((step for step, _, held in self.held() if held == directory), None)

    def held(self) -> Iterator[tuple[int, str, Path]]:
        """
        Yield three values for every directory whose name fits the pattern of checkpoint names: the
        step, the suffix after the name (such as `.partial`), and the path. A hidden directory
        is yielded only if its suffix says that it is being removed.
        """
        match = _NAME.fullmatch(self.name)
        if match is None or not self.directory.is_dir():
            return
        before, behind = re.escape(match["before"]), re.escape(match["behind"])
        named = re.compile(rf"\.?({before}([0-9]+){behind})(.*)")
        for directory in sorted(self.directory.iterdir()):
            known = named.fullmatch(directory.name)
            # skip names that the pattern of this store cannot produce. For example, the pattern
            # `step-{step:08d}` does not produce the name `step-7`
            if known is None or self.name.format(step=int(known[2])) != known[1]:
                continue
            if directory.name.startswith(".") == bool(_GOING.fullmatch(known[3])):
                yield int(known[2]), known[3], directory


def checkpoint_store_of(settings: JobSettings | RankSettings) -> CheckpointStore:
    """
    Return the checkpoint store of a job from its settings.
    """
    return CheckpointStore(directory=settings.checkpoints, name=settings.checkpoint_name)


def partial(final: Path) -> Path:
    """
    Return the path at which the checkpoint `final` is written until it is complete.
    """
    return final.with_name(f"{final.name}{_PARTIAL}")


# ---------------------------------------------------------------- writing


def digest_file(directory: Path, name: str) -> SavedFile:
    """
    Return the size and the digest of the file `name`, relative to `directory`, as it is now.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with (directory / name).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return SavedFile(name=name, size=size, digest=digest.hexdigest())


def write_local_state(directory: Path, rank: int, local_state: bytes) -> SavedFile:
    """
    Write the rank-local state of a rank to a file, and sync the file. The first line of the file
    names the rank.
    """
    name = f"local-state-rank{rank}.bin"
    write_synced(directory / name, _OWNER.format(rank).encode() + local_state)
    return digest_file(directory, name)


def round_of(final: Path, incident: int, number: int) -> Path:
    """
    Return the directory into which every rank writes its part of the periodic checkpoint `final`.
    The name contains the numbers of the incident and the round after which training last resumed.
    So parts that were written before an incident are never combined with parts that were written
    after the incident.
    """
    return final.with_name(f"{final.name}.round-{incident}.{number}.partial")


def open_round(final: Path, incident: int, number: int) -> Path:
    """
    Return the directory into which every rank writes its part of the periodic checkpoint `final`
    (see `round_of`). Create the directory if it does not exist.
    """
    directory = round_of(final, incident, number)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def copy_of(directory: Path, rank: int) -> Path:
    """
    Return the directory into which a rank writes additional copies of shards. Another rank writes
    the first copy of each of these shards to the directory of the checkpoint itself.
    """
    return directory / f"copy-rank{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """
    The contribution of one rank to a periodic checkpoint.
    """

    files: tuple[SavedFile, ...] = ()
    """The files of the checkpoint that the rank has written."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """The digests of the state in the memory of the rank, by shard and part of the shard. Shards
    whose files another rank writes are included. Empty if the adaptor cannot compare the state."""


def write_part(directory: Path, rank: int, part: CheckpointPart) -> None:
    """
    Record in a file that a rank has written all files of its part of a periodic checkpoint. The
    record lists these files.
    """
    beside = directory / f"{_part(rank)}.partial"
    write_synced(beside, msgspec.json.encode(part))
    # write the record under another name, and rename it only when it is complete: so no reader
    # finds a half-written record
    beside.rename(directory / _part(rank))


def claim_parts(directory: Path, world: int) -> list[CheckpointPart] | None:
    """
    Return the parts that all ranks have contributed to a periodic checkpoint, and remove their
    records.

    Any rank may call this function. Only one caller gets the parts, and must then commit the
    checkpoint. All other callers get None. Every caller gets None as long as the part of some rank
    is missing.
    """
    parts = [directory / _part(rank) for rank in range(world)]
    if not all(part.exists() for part in parts):
        return None
    try:
        parts[0].rename(directory / _CLAIMED)
    # the record of rank 0 is gone: another rank has claimed the parts, and commits the checkpoint
    except FileNotFoundError:
        return None
    parts[0] = directory / _CLAIMED
    encoded = [part.read_bytes() for part in parts]
    for part in parts:
        part.unlink()
    return [msgspec.json.decode(part, type=CheckpointPart) for part in encoded]


def give_up(store: CheckpointStore, step: int) -> bool:
    """
    Rename the checkpoints of steps after `step`, so that no run resumes from these checkpoints. The
    job goes on from the end of `step`, and may reach another state at the later steps. All ranks
    may call this function at the same time.

    Return True if there was a checkpoint of a later step.
    """
    found = False
    for later, mark, directory in store.held():
        if later <= step or mark not in ("", _REPLACED) or not _is_of(directory, later):
            continue
        found, place = True, store.place(later)
        with suppress(FileNotFoundError):  # another rank has renamed this checkpoint already
            _set_aside(directory, place.with_name(f"{place.name}{_GIVEN_UP}"))
    return found


def _set_aside(directory: Path, aside: Path) -> None:
    """
    Rename the checkpoint `directory` to `aside`. If an older directory has the name `aside`, give
    the older directory a hidden name first, and remove that directory.

    Another rank may just have renamed the same checkpoint to `aside`. So a hidden directory is
    removed only if its inode differs from the inode of the checkpoint.
    """
    own = directory.stat().st_ino
    while True:
        try:
            directory.rename(aside)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        hidden = _going(aside)
        # if another rank has just hidden the directory `aside`, `rename` raises FileNotFoundError:
        # the name `aside` is free then, and the loop tries again
        with suppress(FileNotFoundError):
            aside.rename(hidden)
            if hidden.stat().st_ino == own:
                hidden.rename(aside)
                return
            shutil.rmtree(hidden, ignore_errors=True)


def _going(directory: Path) -> Path:
    """
    Return a path with a unique hidden name for a directory that is being removed. The name must be
    unique, because a later directory with the same visible name may be removed too.
    """
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}{_REMOVED}")


def sweep(store: CheckpointStore, step: int | None = None) -> None:
    """
    Remove unfinished periodic checkpoints, and the old checkpoints that `retire` has hidden. If
    `step` is given, remove only checkpoints of steps up to `step`. If it is None, remove such
    checkpoints of all steps.
    """
    for begun, mark, directory in store.held():
        ends = _ROUND.fullmatch(mark) or _GOING.fullmatch(mark)
        if ends and (step is None or begun <= step):
            shutil.rmtree(directory, ignore_errors=True)


def retire(store: CheckpointStore, keep: int, step: int) -> None:
    """
    Give old checkpoints a hidden name, so that `sweep` can remove them.

    Do not change the newest `keep` checkpoints of steps up to `step` whose files are all present.
    Hide every checkpoint that is older than these. If `keep` is 0, hide none. Each checkpoint is
    hidden by one rename, so that a half removed directory never counts as a checkpoint.
    """
    whole = sorted(
        there
        for there, mark, directory in store.held()
        if not mark and there <= step and _seems_whole(directory)
    )
    if not keep or len(whole) <= keep:
        return
    for older, mark, directory in store.held():
        old = mark in ("", _REPLACED, _GIVEN_UP) and older < whole[-keep]
        if old and _is_of(directory, older):
            with suppress(FileNotFoundError):  # another rank has hidden this checkpoint already
                directory.rename(_going(directory))


def _is_of(directory: Path, step: int) -> bool:
    """
    Return whether a directory is a checkpoint of `step`, according to its manifest. The name alone
    is not enough: a user's directory with the same name must not be moved.
    """
    manifest = _committed(directory)
    return manifest is not None and manifest.step == step


def _seems_whole(directory: Path) -> bool:
    """
    Return whether every file that the manifest of a checkpoint lists exists with its full size. The
    content of the files is not read.
    """
    manifest = _committed(directory)
    try:
        return manifest is not None and all(
            (directory / file.name).stat().st_size == file.size for file in manifest.files
        )
    except OSError:
        return False


def _part(rank: int) -> str:
    return f"part-rank{rank}.json"


def manifest(
    *, step: int, world: int, adaptor: str, files: Sequence[SavedFile], own: bool = False
) -> Manifest:
    """
    Return the manifest of a checkpoint that consists of `files`. The manifest does not depend on
    the order of `files`.
    """
    every = sorted(files, key=lambda file: file.name)
    ordered = tuple(file for file in every if not _COPY.fullmatch(file.name))
    unsealed = Manifest(
        digest=_UNSEALED,
        schema=SCHEMA,
        step=step,
        world=world,
        adaptor=adaptor,
        files=ordered,
        local_state={
            int(match[1]): file.name
            for file in ordered
            if (match := _LOCAL_STATE.fullmatch(file.name))
        },
        own=own,
        copies=tuple(file for file in every if _COPY.fullmatch(file.name)),
    )
    return replace(unsealed, digest=_digest(_encoded(unsealed)))


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def commit(partial: Path, final: Path, manifest: Manifest) -> None:
    """
    Write the manifest into the directory `partial`, and rename the directory to `final`. A second
    call with the same arguments changes nothing. An earlier checkpoint with the name `final` is
    replaced: the job wrote that checkpoint before the job returned to an earlier step.

    If `final` is an undamaged checkpoint of the same step and has the rank-local state of more
    ranks, `final` is kept and `partial` is removed. This can happen with a last checkpoint, which
    lacks the rank-local state of ranks whose nodes are lost.

    Raises `CheckpointCorrupt` when `final` exists and is no readable checkpoint. Then `final` is
    not changed, and `partial` is complete except for its name. Raises `CheckpointCorrupt` also when
    `partial` does not exist and `final` has another manifest.
    """
    if _has_more(final, manifest):
        shutil.rmtree(partial, ignore_errors=True)
        return
    if not partial.exists():
        if is_there(final, manifest):
            return
        raise CheckpointCorrupt(
            f"the unfinished checkpoint {partial} no longer exists, so it cannot be renamed to "
            f"{final}, and {final} is another checkpoint"
        )
    write_synced(partial / MANIFEST, _encoded(manifest))
    written = (*manifest.files, *manifest.copies)
    for directory in {(partial / file.name).parent for file in written} | {partial}:
        sync(directory)
    if final.exists() and _committed(final) is None:
        why = f"{final} exists and cannot be read as a checkpoint, so tft does not replace it"
        # do not tell the operator to rename the directory of a periodic checkpoint, because the
        # function `sweep` will remove that directory
        if not partial.name.startswith(f"{final.name}.round-"):
            why += (
                f"; the complete new checkpoint is in {partial}: move {final.name} away, and "
                f"rename {partial.name} to {final.name}"
            )
        raise CheckpointCorrupt(why)
    replaced = final.with_name(f"{final.name}{_REPLACED}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        # move the old checkpoint away first, because a rename cannot replace a directory that is
        # not empty. If this process ends before the next rename, the function `newest` still finds
        # the old checkpoint under its new name
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _has_more(final: Path, manifest: Manifest) -> bool:
    """
    Return whether the directory `final` is an undamaged checkpoint of the same step and job as
    `manifest`, and has the rank-local state of more ranks.
    """
    there = _committed(final)
    if there is None or not there.local_state.keys() > manifest.local_state.keys():
        return False
    ours, other = ((each.step, each.world, each.adaptor, each.own) for each in (manifest, there))
    if ours != other:
        return False
    try:
        verify(final)
    except (CheckpointCorrupt, OSError):
        return False
    return True


def has(store: CheckpointStore, step: int) -> bool:
    """
    Return whether the store has a checkpoint of `step`. Only the manifest is read.
    """
    return _is_of(store.place(step), step)


def is_there(final: Path, manifest: Manifest) -> bool:
    """
    Return whether the directory `final` is a checkpoint with exactly this manifest. Only the
    manifest is read.
    """
    return _committed(final) == manifest


def _committed(final: Path) -> Manifest | None:
    try:
        return manifest_of(final)
    except CheckpointCorrupt:
        return None


def write_synced(path: Path, content: bytes) -> None:
    """
    Write a file with the content `content`, and sync the file to the disk.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- reading


def newest(store: CheckpointStore) -> Path | None:
    """
    Return the path of a store's complete checkpoint of the highest step, or None if the store has
    no complete checkpoint. The files of the checkpoint are not checked.
    """
    return next(iter(committed(store)), None)


def committed(store: CheckpointStore) -> list[Path]:
    """
    Return the paths of the complete checkpoints of a store, the highest step first. The files of
    the checkpoints are not checked.
    """
    found = [
        (step, not mark, directory)
        for step, mark, directory in store.held()
        if mark in ("", _REPLACED) and (directory / MANIFEST).is_file()
    ]
    return [directory for _, _, directory in sorted(found, reverse=True)]


def check_name(store: CheckpointStore, directory: Path, known: Manifest) -> None:
    """
    Check the name of a checkpoint. Raises `CheckpointCorrupt` when the step in the name is not the
    step in the manifest `known`, for example because a user has renamed the directory.
    """
    named = store.step_of(directory)
    if named is not None and named != known.step:
        raise CheckpointCorrupt(
            f"the name of the checkpoint {directory} says step {named}, but its files contain the "
            f"state at the end of step {known.step}"
        )


def older(store: CheckpointStore, than: Manifest) -> list[tuple[str, int]]:
    """
    Return the path and the step of each checkpoint that is older than the checkpoint `than`, and
    from which the same job could continue. Only the manifests are read, so a listed checkpoint may
    still have damaged files.
    """
    found: dict[int, Path] = {}
    for directory in committed(store):
        known = _committed(directory)
        if known is None or known.step >= than.step or known.without_local_state:
            continue
        if known.step != store.step_of(directory):
            continue
        if (known.world, known.adaptor, known.own) == (than.world, than.adaptor, than.own):
            # a step may have two checkpoints: list only the newer checkpoint, which the function
            # `committed` returns first
            found.setdefault(known.step, directory)
    return [(str(directory), step) for step, directory in found.items()]


def verify(directory: Path) -> Manifest:
    """
    Check all files of a checkpoint, and return its manifest. A shard with a damaged file is
    accepted if the checkpoint contains an undamaged additional copy of the shard.

    Raises `CheckpointCorrupt` if a shard has a damaged file and no undamaged additional copy. The
    error names the file.
    """
    known = manifest_of(directory)
    firsts = (file.name.partition("/")[0] for file in known.files)
    # the first part of a file's name is the name of its shard. Only the file with the state that is
    # not in the user's objects has the suffix BESIDE after that name, so remove the suffix. A file
    # that belongs to no shard is checked like a shard
    for shard in dict.fromkeys(first.removesuffix(BESIDE) for first in firsts):
        _whole_at(directory, known, shard)
    return known


def damaged(directory: Path) -> list[str]:
    """
    Return one sentence for each damaged file of a checkpoint. The files of additional copies are
    checked too.

    Raises `CheckpointCorrupt` when the manifest cannot be read.
    """
    known = manifest_of(directory)
    return [each for file in (*known.files, *known.copies) if (each := _damage(directory, file))]


def remove_shard(place: Path, shard: str) -> None:
    """
    Remove the files of a shard from the directory `place` of an additional copy, and the directory
    if it is empty then.

    Raises `OSError` if that fails, or if other files are in the directory.
    """
    for left in list(place.iterdir()):
        if not _belongs(left.name, shard):
            continue
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    place.rmdir()


def _belongs(name: str, shard: str) -> bool:
    return name == shard or name.startswith((f"{shard}/", f"{shard}."))


def _copies(known: Manifest, shard: str) -> dict[str, list[SavedFile]]:
    """
    Return the files of each additional copy of a shard, by the name of the directory that contains
    the copy.
    """
    found: dict[str, list[SavedFile]] = {}
    for file in known.copies:
        match = _COPY.fullmatch(file.name)
        if match is not None and _belongs(match[2], shard):
            found.setdefault(match[1], []).append(file)
    return found


def _first_damage(directory: Path, files: Sequence[SavedFile]) -> str:
    return next(filter(None, (_damage(directory, file) for file in files)), "")


def _damage(directory: Path, file: SavedFile) -> str:
    try:
        _verify_file(directory, file)
    except CheckpointCorrupt as why:
        return str(why)
    return ""


def _verify_file(directory: Path, file: SavedFile) -> None:
    try:
        found = digest_file(directory, file.name)
    except OSError as error:
        raise CheckpointCorrupt(
            f"the checkpoint {directory} is damaged: its file {file.name}, of {file.size} bytes, "
            f"cannot be read: {error.strerror}"
        ) from None
    if found != file:
        raise CheckpointCorrupt(
            f"the checkpoint {directory} is damaged: its file {file.name} differs from what was "
            f"written: expected {file.size} bytes with digest {file.digest}, found {found.size} "
            f"bytes with digest {found.digest}"
        )


def verify_shards(
    directory: Path, shards: Sequence[str], rank: int, step: int | None = None
) -> tuple[Manifest, dict[str, Path]]:
    """
    Check the files that a rank is about to read: the files of `shards`, and the file with the
    rank-local state of `rank`. A file belongs to a shard if its name is the name of the shard, or
    begins with that name and a slash or a dot. Return the manifest, and for each shard a directory
    in which all its files are undamaged.

    Raises `CheckpointCorrupt` when a file of the rank-local state is damaged, or when a shard has
    no undamaged copy. Raises `CheckpointCorrupt` also when `step` is given and the checkpoint is of
    another step.
    """
    known = manifest_of(directory)
    if step is not None and known.step != step:
        raise CheckpointCorrupt(
            f"the checkpoint {directory} contains the state at the end of step {known.step}, not "
            f"of step {step}"
        )
    for file in known.files:
        if file.name == known.local_state.get(rank):
            _verify_file(directory, file)
    return known, {shard: _whole_at(directory, known, shard) for shard in shards}


def _whole_at(directory: Path, known: Manifest, shard: str) -> Path:
    """
    Return a directory in which every file of a shard is undamaged: the directory of the checkpoint
    itself, or the directory of an additional copy of the shard. Raises `CheckpointCorrupt` if every
    copy of the shard is damaged.
    """
    why = _first_damage(directory, [file for file in known.files if _belongs(file.name, shard)])
    if not why:
        return directory
    for copy, files in _copies(known, shard).items():
        if not _first_damage(directory, files):
            return directory / copy
    raise CheckpointCorrupt(why)


def read_local_state(directory: Path, rank: int) -> bytes:
    """
    Return the rank-local state of a rank from a checkpoint.

    Raises `CheckpointCorrupt` when the state is missing, cannot be read, or names another rank.
    """
    name = manifest_of(directory).local_state.get(rank)
    if name is None:
        raise CheckpointCorrupt(
            f"the checkpoint {directory} contains no rank-local state of rank {rank} (random "
            "generators, data position)"
        )
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(
            f"the file {name} of the checkpoint {directory} cannot be read: {error.strerror}"
        ) from None
    owner = _OWNER.format(rank).encode()
    if not content.startswith(owner):
        raise CheckpointCorrupt(
            f"the file {name} of the checkpoint {directory} is not the rank-local state of rank "
            f"{rank} (random generators, data position)"
        )
    return content.removeprefix(owner)


def manifest_of(directory: Path) -> Manifest:
    """
    Return the manifest of a checkpoint. The other files are not read. Raises `CheckpointCorrupt`
    when the manifest cannot be read or is damaged.
    """
    path = directory / MANIFEST
    try:
        content = path.read_bytes()
        schema = msgspec.json.decode(content, type=_Versioned).schema
        if schema != SCHEMA:
            raise CheckpointCorrupt(
                f"the checkpoint with the manifest {path} was written by another version of tft: "
                f"its format is schema {schema}; this version of tft reads schema {SCHEMA}"
            )
        known = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise CheckpointCorrupt(
            f"{directory} cannot be used as a checkpoint: its file {MANIFEST} cannot be read: "
            f"{error.strerror}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path} is not a valid checkpoint manifest: {error}") from None
    if _digest(content.replace(known.digest.encode(), _UNSEALED.encode(), 1)) != known.digest:
        raise CheckpointCorrupt(
            f"the checkpoint manifest {path} differs from what was written: it does not "
            f"have the digest {known.digest} that is stored in it"
        )
    names = [file.name for file in known.files]
    for name in [*names, *known.local_state.values(), *(file.name for file in known.copies)]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointCorrupt(
                f"the checkpoint manifest {path} names the file {name!r}, which is outside the "
                "checkpoint"
            )
    if not set(known.local_state.values()) <= set(names):
        raise CheckpointCorrupt(
            f"the checkpoint manifest {path} names a file with rank-local state that is missing "
            "from its list of files"
        )
    return known
