"""
The command `tft checkpoint recover`. It restores the lost checkpoint file of a rank by a copy from
a rank that held the same state. The command also restores the file group_info.pb of the lost rank,
in which MindSpore records which ranks held the same state.
"""

import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import xxhash

from tft.errors import CheckpointCorrupt, UsageError
from tft_mindspore.group_info import GroupInfo, read_group_info, write_group_info
from tft_mindspore.rank_files import (
    DIRECTORIES,
    Name,
    damage,
    names,
    newest,
    put,
    read_meta,
    write_meta,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """
    The newest checkpoint file of a rank that held the same state as the lost rank.
    """

    rank: int
    directory: Path
    name: Name

    @property
    def path(self) -> Path:
        """
        The path of the checkpoint file.
        """
        return self.directory / str(self.name)

    @property
    def counted_on(self) -> bool:
        """
        True if the file `meta.json` in the same directory names this checkpoint file. In this case
        MindSpore Transformers wrote the checkpoint file.

        MindSpore Transformers continues the count of epochs in the next run. So of two files, the
        one with the higher epoch and step is newer, even if they are of different runs. MindSpore
        itself counts epochs from 1 in each run, and writes a file for each rank. So for its files,
        the number of the run must be compared before the epoch.
        """
        return read_meta(self.directory) == self.name


def recover(path: Path, group_info: Path, lost: int, replace: bool) -> int:
    """
    Copy the newest checkpoint file of a rank that held the same state (a replica) to the place
    where the rank `lost` has its checkpoint file.

    The directory `path` has one directory for each rank. `group_info` is the path of the file
    group_info.pb of the lost rank or of a replica. If that file belongs to a replica, the
    group_info.pb of the lost rank is written too, unless the lost rank has a complete one. With
    `replace`, the copy is made even if the lost rank has a complete checkpoint file that is as new.
    Return 0.

    Raises `UsageError` or `CheckpointCorrupt` for files that cannot be used, before anything is
    changed. Raises `UsageError` if a file cannot be written. Files that were written before the
    error remain.
    """
    info = _group_info(group_info, lost)
    others = [rank for rank in sorted(info.replicas) if rank != lost]
    form = _form(path, lost, others)
    place = path / form.format(lost)
    source = _source(path, form, lost, others)
    name = source.name.of(lost)
    target = place / str(name)
    if not replace:
        _check_lost(place, lost, source, name)
    try:
        _copy(source.path, target)
        if source.counted_on:
            write_meta(place, name)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    size, digest = _digest(target)
    click.echo(
        f"{target}: copied from rank {source.rank}, which held the same state as rank {lost}; "
        f"{size} bytes with digest {digest}"
    )
    own = _own_group_info(group_info, lost, others)
    if own is not None and not _is_whole(own):
        _write_group_info(own, info, lost)
        click.echo(f"{own}: written for rank {lost} from {group_info}")
    return 0


def _own_group_info(group_info: Path, lost: int, others: Sequence[int]) -> Path | None:
    """
    Return the path of the group_info.pb of the lost rank, derived from the path `group_info`.

    A component of the path, such as `rank_4`, names the rank to which the file belongs. If that
    rank is a replica (one of `others`), return the path with the lost rank in place of the replica.
    If several components name a replica, the last one is changed. Return None if no component names
    a replica.
    """
    forms = "|".join(form.format("") for form in DIRECTORIES)
    named = re.compile(rf"(?<![A-Za-z0-9])({forms})({'|'.join(map(str, others))})(?![A-Za-z0-9])")
    parts = list(group_info.parts)
    for place in reversed(range(len(parts))):
        changed = named.sub(rf"\g<1>{lost}", parts[place])
        if changed != parts[place]:
            return Path(*parts[:place], changed, *parts[place + 1 :])
    return None


def _is_whole(group_info: Path) -> bool:
    try:
        read_group_info(group_info)
    except UsageError:
        return False
    return True


def _write_group_info(own: Path, info: GroupInfo, lost: int) -> None:
    """
    Write the group_info.pb of the lost rank.

    `own` is the path of the file to write. `info` is the content of the group_info.pb of a replica.
    The written file has the same replicas, and those groups of `info` that contain the lost rank.

    Raises `UsageError` if the file cannot be written.
    """
    groups = {name: ranks for name, ranks in info.groups.items() if lost in ranks}
    try:
        write_group_info(own, GroupInfo(replicas=info.replicas, groups=groups))
    except OSError as error:
        raise UsageError(f"{own} cannot be written: {error.strerror}") from None


def _check_lost(place: Path, lost: int, source: _Source, name: Name) -> None:
    """
    Raise `UsageError` if the rank `lost` has not lost its checkpoint: it has a complete file that
    is at least as new as the file of `source`. `place` is the directory of the rank `lost`, and
    `name` is the name that a copy of the file of `source` would have there.
    """
    for own in names(place, lost):
        as_new = own.at >= name.at if source.counted_on else own.age >= name.age
        if as_new and not damage(place / str(own), thoroughly=True):
            raise UsageError(
                f"the checkpoint of rank {lost} is not lost: the file {place / str(own)} is "
                "complete. Give the option --replace to replace this file anyway"
            )


def _group_info(group_info: Path, lost: int) -> GroupInfo:
    """
    Read the group_info.pb, and check that it names other ranks that held the same state as the rank
    `lost`.

    Raises `UsageError` if the file does not name the rank `lost`, or names no other rank.
    """
    info = read_group_info(group_info)
    known = info.replicas
    if lost not in known:
        raise UsageError(
            f"{group_info} names the ranks {list(known)} as holders of the same state, and not "
            f"rank {lost}; expected is the file that was written for rank {lost}, or for a rank "
            "that held the same state"
        )
    if len(known) == 1:
        raise UsageError(f"{group_info} says that no other rank held the same state as rank {lost}")
    return info


def _form(path: Path, lost: int, others: Sequence[int]) -> str:
    """
    Return the pattern of the names of the directories of the ranks `others`, such as `rank_{}`.

    Raises `UsageError` if no known pattern matches a directory, or if more than one pattern does.
    """
    forms = [
        form for form in DIRECTORIES if any((path / form.format(rank)).is_dir() for rank in others)
    ]
    if len(forms) == 1:
        return forms[0]
    ranks = f"{_ranks(others)}, which held the same state as rank {lost}"
    if forms:
        named = " and as ".join(form.format("R") for form in forms)
        raise UsageError(f"{path} has two directories each for {ranks}: as {named}")
    expected = " or ".join(form.format(others[0]) for form in DIRECTORIES)
    raise UsageError(f"{path} has no directory of {ranks}; expected is {expected}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _source(path: Path, form: str, lost: int, others: Sequence[int]) -> _Source:
    """
    Return the newest checkpoint file of the ranks `others`, which held the same state as the rank
    `lost`. If several files are equally new, return the first complete file, in the order of
    `others`.

    Raises `UsageError` if these ranks have no checkpoint file, and `CheckpointCorrupt` if none of
    the newest files is complete.
    """
    found = []
    for rank in others:
        directory = path / form.format(rank)
        name = newest(directory, rank)
        if name is not None:
            found.append(_Source(rank=rank, directory=directory, name=name))
    if not found:
        raise UsageError(
            f"{path} has no checkpoint of {_ranks(others)}, which held the same state as rank "
            f"{lost}: the state of rank {lost} is lost"
        )
    counted_on = all(source.counted_on for source in found)
    ages = [source.name.at if counted_on else source.name.age for source in found]
    damages = []
    for source, age in zip(found, ages, strict=True):
        if age == max(ages):
            why = damage(source.path, thoroughly=True)
            if not why:
                return source
            damages.append(why)
    raise CheckpointCorrupt(
        f"rank {lost} cannot be given the newest checkpoint: {'; '.join(damages)}"
    )


def _copy(source: Path, target: Path) -> None:
    """
    Copy a file to `target`. Raises `CheckpointCorrupt` if the copy differs from the source.
    """
    size, digest = _digest(source)

    def write(draft: Path) -> None:
        shutil.copyfile(source, draft)
        copied_size, copied_digest = _digest(draft)
        if (copied_size, copied_digest) != (size, digest):
            raise CheckpointCorrupt(
                f"{draft} differs from {source}: {copied_size} bytes with digest {copied_digest}, "
                f"not {size} with {digest}"
            )

    put(target, write)


def _digest(path: Path) -> tuple[int, str]:
    """
    Return the size of a file in bytes, and the digest of its content.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return file.tell(), digest.hexdigest()


def recover_command() -> click.Command:
    """
    Return the command `tft checkpoint recover`.
    """
    return click.Command(
        "recover",
        callback=recover,
        params=[
            click.Argument(["path"], type=click.Path(path_type=Path)),
            click.Option(
                ["--group-info"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                required=True,
                help="The group_info.pb that MindSpore wrote for the lost rank, or for a rank that "
                "held the same state.",
            ),
            click.Option(
                ["--lost"],
                type=click.IntRange(min=0),
                metavar="RANK",
                required=True,
                help="The rank whose checkpoint is gone.",
            ),
            click.Option(
                ["--replace"],
                is_flag=True,
                help="Replace the checkpoint of the rank even if it is complete and not older.",
            ),
        ],
        help="Replace the lost checkpoint of a rank of a MindSpore job by a copy from a rank "
        "that held the same state, and write its group_info.pb if it has none. PATH has a "
        "directory rank_R or ckpt_dirR for each rank R.",
    )
