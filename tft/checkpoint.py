"""
A checkpoint on the disk: its directory, the manifest that makes it one, and the private state
of each rank. Knows no framework: what an adaptor writes is a list of files to it.

    step-00000042/           manifest.json, private-rank0.bin, …, the adaptor's
    step-00000042.partial/   being written, or never finished
    step-00000042.round-3.1.partial/  the same of a periodic one, see `round_of`
    step-00000042.given-up/  of a way that the job has turned back from
    step-00000042.replaced/  an earlier one of the same step, on its way out
    .step-00000042.0a1b2c3d.removed/  one that is old enough, on its way out, whatever mark it had

A directory is a checkpoint when it has its final name, and it gets that name, by one rename, when
every file in it is synced. Whoever reads it checks the files against the manifest first.

Where they lie and what they are called is the job's to say (`CheckpointStore`). That directory may hold anything
else, too: what does not have such a name is never touched.
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

SCHEMA = 2
"""Of the manifest; a reader refuses another one."""

_UNSEALED = "0" * 32
"""What stands in a manifest for its own digest while that is computed."""

MANIFEST = "manifest.json"

_BLOCK = 4 * 2**20
"""Bytes read at a time to digest a file: few calls, and nothing beside the state they belong to."""

_REPLACED = ".replaced"
_GIVEN_UP = ".given-up"
_PARTIAL = ".partial"
_REMOVED = ".removed"
_MARKS = (_REPLACED, _GIVEN_UP, _PARTIAL, _REMOVED)
"""What stands behind the name of a checkpoint that is not to be read, or not for long."""
_ROUND = re.compile(r"\.round-[0-9]+\.[0-9]+\.partial")
_GOING = re.compile(rf"({re.escape(_REPLACED)}|{re.escape(_GIVEN_UP)})?\.[0-9a-f]{{8}}\.removed")

_NAME = re.compile(r"(?P<before>[^{}]*)\{step(:0[1-9][0-9]?d)?\}(?P<behind>[^{}]*)")
_CLAIMED = "claimed.json"
BESIDE = ".beside"
"""What stands behind the name of a shard for the file that is kept beside what the user's own wrote."""
_PRIVATE = re.compile(r"private-rank(\d+)\.bin")
_OWNER = "tft private state of rank {}\n"
"""What a file of private state begins with: under another rank's name it is refused."""
_COPY = re.compile(r"(copy-rank\d+)/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """
    What belongs to a checkpoint.
    """

    digest: str
    """Of the manifest itself, as it is written, with zeros in this place. The first field: a reader finds it there."""
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
    own: bool = False
    """Its shards were written by functions of the script's own."""
    copies: tuple[SavedFile, ...] = ()
    """Further copies of shards: each in the directory of the rank that wrote it, see `copy_of`."""

    @property
    def without_local_state(self) -> list[int]:
        """
        The ranks whose private state was lost with their node.
        """
        return sorted(set(range(self.world)) - set(self.private))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    """
    What every version of a manifest has.
    """

    schema: int


# ---------------------------------------------------------------- names


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """
    Where the checkpoints of a job lie, and what they are called.
    """

    directory: Path
    name: str = CHECKPOINT_NAME
    """With `{step}` in it."""

    def check(self) -> None:
        """
        Raises `UsageError` for a name by which the checkpoints of two steps could not be told apart, or
        what is one from what is not.
        """
        name = self.name
        match = _NAME.fullmatch(name)
        if match is None:
            raise UsageError(
                f"--checkpoint-name {name!r} is to have the step in it once, as {{step}} or, with zeros "
                "before it, {step:08d}, and no other braces"
            )
        if "/" in name or "\0" in name or name.startswith("."):
            raise UsageError(
                f"--checkpoint-name {name!r} is to be a name that can be seen, not a path: "
                "--checkpoint-dir says where checkpoints are"
            )
        if match["behind"].endswith(_MARKS):
            raise UsageError(
                f"--checkpoint-name {name!r} ends as what is being written or was given up does: "
                f"{', '.join(_MARKS)} are not to be used"
            )

    def place(self, step: int) -> Path:
        """
        Of the checkpoint of a step.
        """
        return self.directory / self.name.format(step=step)

    def step_of(self, directory: Path) -> int | None:
        """
        Return the step that the name of a directory says; None for a name that is no checkpoint's here.
        """
        return next((step for step, _, held in self.held() if held == directory), None)

    def held(self) -> Iterator[tuple[int, str, Path]]:
        """
        All that has such a name: the step, what stands behind the name, and the directory. What is
        hidden is on its way out.
        """
        match = _NAME.fullmatch(self.name)
        if match is None or not self.directory.is_dir():
            return
        before, behind = re.escape(match["before"]), re.escape(match["behind"])
        named = re.compile(rf"\.?({before}([0-9]+){behind})(.*)")
        for directory in sorted(self.directory.iterdir()):
            known = named.fullmatch(directory.name)
            # who writes 7 as 00000007 has not written what is called 7
            if known is None or self.name.format(step=int(known[2])) != known[1]:
                continue
            if directory.name.startswith(".") == bool(_GOING.fullmatch(known[3])):
                yield int(known[2]), known[3], directory


def checkpoint_store_of(settings: JobSettings | RankSettings) -> CheckpointStore:
    """
    That of a job, as its parts were told.
    """
    return CheckpointStore(directory=settings.checkpoints, name=settings.checkpoint_name)


def partial(final: Path) -> Path:
    """
    Where a checkpoint is written until it is complete.
    """
    return final.with_name(f"{final.name}{_PARTIAL}")


# ---------------------------------------------------------------- writing


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
    Write the private state of a rank, synced. The file says whose state it is.
    """
    name = f"private-rank{rank}.bin"
    write_synced(directory / name, _OWNER.format(rank).encode() + private)
    return digest_file(directory, name)


def round_of(final: Path, incident: int, number: int) -> Path:
    """
    Where the ranks write their parts of a periodic checkpoint, each on its own. Those that were copied
    after the same order to go on, that of a round of an incident, belong together.
    """
    return final.with_name(f"{final.name}.round-{incident}.{number}.partial")


def open_round(final: Path, incident: int, number: int) -> Path:
    """
    The same, made if need be.
    """
    directory = round_of(final, incident, number)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def copy_of(directory: Path, rank: int) -> Path:
    """
    Where a rank writes further copies of what others write.
    """
    return directory / f"copy-rank{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """
    What one rank has done for a periodic checkpoint.
    """

    files: tuple[SavedFile, ...] = ()
    """Those it has written."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of what it held, by shard and part, whether it has written that or not; empty: it cannot be compared."""


def write_part(directory: Path, rank: int, part: Part) -> None:
    """
    Note that a rank has written its part, and which files that is.
    """
    beside = directory / f"{_part(rank)}.partial"
    write_synced(beside, msgspec.json.encode(part))
    beside.rename(directory / _part(rank))  # so that it is not read by halves


def claim_parts(directory: Path, world: int) -> list[Part] | None:
    """
    The parts of all ranks, for the one caller who is to commit them; None for all others, and
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
    return [msgspec.json.decode(part, type=Part) for part in encoded]


def give_up(store: CheckpointStore, step: int) -> bool:
    """
    The job goes on after `step` and may come another way: checkpoints of later steps are set aside, so
    that nobody resumes from them. Every rank may do it, at once. Whether there were any.
    """
    found = False
    for later, mark, directory in store.held():
        if later <= step or mark not in ("", _REPLACED) or not _is_of(directory, later):
            continue
        found, place = True, store.place(later)
        with suppress(FileNotFoundError):  # another rank was faster
            _set_aside(directory, place.with_name(f"{place.name}{_GIVEN_UP}"))
    return found


def _set_aside(directory: Path, aside: Path) -> None:
    """
    An older one that was set aside goes. What is in the way is hidden before it is looked at: another
    rank may have put there, just now, what this one is about to.
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
        with suppress(FileNotFoundError):  # another rank has hidden it: the way is free
            aside.rename(hidden)
            if hidden.stat().st_ino == own:
                hidden.rename(aside)
                return
            shutil.rmtree(hidden, ignore_errors=True)


def _going(directory: Path) -> Path:
    """
    A name for it on its way out, which nothing else has: what is begun in its place may go, too.
    """
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}{_REMOVED}")


def sweep(store: CheckpointStore, step: int | None = None) -> None:
    """
    Remove what was begun of periodic checkpoints up to `step`, or of all, and never finished; and what
    is left of those that were retired.
    """
    for begun, mark, directory in store.held():
        ends = _ROUND.fullmatch(mark) or _GOING.fullmatch(mark)
        if ends and (step is None or begun <= step):
            shutil.rmtree(directory, ignore_errors=True)


def retire(store: CheckpointStore, keep: int, step: int) -> None:
    """
    Take what is older than the newest `keep` whole checkpoints up to `step` out of sight, one rename
    each: what is half removed is never taken for a checkpoint. `sweep` removes it.
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
            with suppress(FileNotFoundError):  # another rank was faster
                directory.rename(_going(directory))


def _is_of(directory: Path, step: int) -> bool:
    """
    It is a checkpoint of that step. What has only its name is not ours to move.
    """
    manifest = _committed(directory)
    return manifest is not None and manifest.step == step


def _seems_whole(directory: Path) -> bool:
    """
    Every file is there with all its bytes. What is in them is for who reads them to check.
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
    The manifest of a checkpoint of these files. Its content does not depend on their order.
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
        private={
            int(match[1]): file.name for file in ordered if (match := _PRIVATE.fullmatch(file.name))
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
    Make what lies in `partial` the checkpoint `final`. Done again after it was done, it changes
    nothing. An earlier checkpoint of that name, from before the job was resumed, is replaced; anything
    else of that name stays, and `CheckpointCorrupt` is raised: `partial` lacks nothing then but its name.
    """
    if not partial.exists():
        if is_there(final, manifest):
            return
        raise CheckpointCorrupt(f"{partial} is gone, and {final} is not the checkpoint it was for")
    write_synced(partial / MANIFEST, _encoded(manifest))
    written = (*manifest.files, *manifest.copies)
    for directory in {(partial / file.name).parent for file in written} | {partial}:
        sync(directory)
    if final.exists() and _committed(final) is None:
        why = f"{final} is there and is no checkpoint that can be read: nothing is put in its place"
        if not partial.name.startswith(f"{final.name}.round-"):  # `sweep` takes those
            why += (
                f"; the checkpoint is whole in {partial}: move the other away and rename this one"
            )
        raise CheckpointCorrupt(why)
    replaced = final.with_name(f"{final.name}{_REPLACED}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)  # no rename takes the place of a directory; `newest` knows this one
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def is_there(final: Path, manifest: Manifest) -> bool:
    """
    Whether `final` is the checkpoint of this manifest, whose files are not looked at.
    """
    return _committed(final) == manifest


def _committed(final: Path) -> Manifest | None:
    try:
        return manifest_of(final)
    except CheckpointCorrupt:
        return None


def write_synced(path: Path, content: bytes) -> None:
    """
    A file with this content, on the disk.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- reading


def newest(store: CheckpointStore) -> Path | None:
    """
    The committed checkpoint of the highest step, unread; None if there is none.
    """
    return next(iter(committed(store)), None)


def committed(store: CheckpointStore) -> list[Path]:
    """
    The committed checkpoints, that of the highest step first, unread.
    """
    found = [
        (step, not mark, directory)
        for step, mark, directory in store.held()
        if mark in ("", _REPLACED) and (directory / MANIFEST).is_file()
    ]
    return [directory for _, _, directory in sorted(found, reverse=True)]


def check_name(store: CheckpointStore, directory: Path, known: Manifest) -> None:
    """
    Raise `CheckpointCorrupt` where a checkpoint has the name of another step: it was renamed or copied.
    """
    named = store.step_of(directory)
    if named is not None and named != known.step:
        raise CheckpointCorrupt(
            f"{directory} has the name of a checkpoint of step {named}, and holds the end of step {known.step}"
        )


def older(store: CheckpointStore, than: Manifest) -> list[tuple[str, int]]:
    """
    The committed checkpoints of earlier steps that the same job could go on from, unread, each with its
    step: whoever reads one finds out whether it is whole.
    """
    found: dict[int, Path] = {}
    for directory in committed(store):
        known = _committed(directory)
        if known is None or known.step >= than.step or known.without_local_state:
            continue
        if known.step != store.step_of(directory):
            continue
        if (known.world, known.adaptor, known.own) == (than.world, than.adaptor, than.own):
            found.setdefault(known.step, directory)  # before one of that step on its way out
    return [(str(directory), step) for step, directory in found.items()]


def verify(directory: Path) -> Manifest:
    """
    The manifest of a checkpoint that can be read: every file is as it was written, or there is another
    copy of the shard it belongs to. Raises `CheckpointCorrupt` naming the first that is lost.
    """
    known = manifest_of(directory)
    firsts = (file.name.partition("/")[0] for file in known.files)
    # what is beside a shard is read with it; a file of no shard is judged as a shard of that name
    for shard in dict.fromkeys(first.removesuffix(BESIDE) for first in firsts):
        _whole_at(directory, known, shard)
    return known


def damaged(directory: Path) -> list[str]:
    """
    What is not as it was written of a checkpoint, a sentence for each file; copies too.
    """
    known = manifest_of(directory)
    return [each for file in (*known.files, *known.copies) if (each := _damage(directory, file))]


def _belongs(name: str, shard: str) -> bool:
    return name == shard or name.startswith((f"{shard}/", f"{shard}."))


def _copies(known: Manifest, shard: str) -> dict[str, list[SavedFile]]:
    """
    By directory: the files of further copies of a shard.
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
            f"{directory}: {file.name}, of {file.size} bytes, cannot be read: {error.strerror}"
        ) from None
    if found != file:
        raise CheckpointCorrupt(
            f"{directory}: {file.name} is not what was written: expected {file.size} bytes "
            f"with digest {file.digest}, found {found.size} with {found.digest}"
        )


def verify_shards(
    directory: Path, shards: Sequence[str], rank: int, step: int | None = None
) -> tuple[Manifest, dict[str, Path]]:
    """
    Check what a rank is about to read: the files of these shards, which begin with the shard's name,
    and its private state. The manifest they are in, and under which directory each shard is whole.
    Raises `CheckpointCorrupt`, also where the checkpoint is not of `step`.
    """
    known = manifest_of(directory)
    if step is not None and known.step != step:
        raise CheckpointCorrupt(
            f"{directory} holds the end of step {known.step}, not of step {step}"
        )
    for file in known.files:
        if file.name == known.private.get(rank):
            _verify_file(directory, file)
    return known, {shard: _whole_at(directory, known, shard) for shard in shards}


def _whole_at(directory: Path, known: Manifest, shard: str) -> Path:
    """
    Where every file of a shard is as it was written: in the checkpoint, or in a further copy.
    """
    why = _first_damage(directory, [file for file in known.files if _belongs(file.name, shard)])
    if not why:
        return directory
    for copy, files in _copies(known, shard).items():
        if not _first_damage(directory, files):
            return directory / copy
    raise CheckpointCorrupt(why)


def read_private(directory: Path, rank: int) -> bytes:
    """
    The private state of a rank.
    """
    name = manifest_of(directory).private.get(rank)
    if name is None:
        raise CheckpointCorrupt(f"{directory} holds no private state of rank {rank}")
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(f"{directory}: {name} cannot be read: {error.strerror}") from None
    owner = _OWNER.format(rank).encode()
    if not content.startswith(owner):
        raise CheckpointCorrupt(f"{directory}: {name} is not the private state of rank {rank}")
    return content.removeprefix(owner)


def manifest_of(directory: Path) -> Manifest:
    """
    The manifest of a checkpoint, whose files are not looked at. Raises `CheckpointCorrupt` where it
    cannot be read.
    """
    path = directory / MANIFEST
    try:
        content = path.read_bytes()
        schema = msgspec.json.decode(content, type=_Versioned).schema
        if schema != SCHEMA:
            raise CheckpointCorrupt(f"{path} has schema {schema}; schema {SCHEMA} is known here")
        known = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise CheckpointCorrupt(
            f"{directory} has no {MANIFEST} that can be read: {error.strerror}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be understood: {error}") from None
    if _digest(content.replace(known.digest.encode(), _UNSEALED.encode(), 1)) != known.digest:
        raise CheckpointCorrupt(
            f"{path} is not what was written: its digest is not the one that it names, {known.digest}"
        )
    names = [file.name for file in known.files]
    for name in [*names, *known.private.values(), *(file.name for file in known.copies)]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointCorrupt(f"{path} names {name!r}, which is outside the checkpoint")
    if not set(known.private.values()) <= set(names):
        raise CheckpointCorrupt(f"{path} names private state that is not among its files")
    return known
