"""
Decides where the checkpoints of a MindSpore job are stored, in the directory layout of MindSpore
Transformers. Also decides which ranks write a checkpoint, and from which checkpoint a job can
continue:

    checkpoint/rank_0/llama2_13b_rank_0-5_1.ckpt     the state at the end of step 1 of epoch 5
    checkpoint/rank_0/meta.json                      names rank 0's newest file; written after it
    checkpoint/rank_5/llama2_13b_rank_5-5_1.ckpt     rank 5 has written for the lost rank 1 too
    …

A last checkpoint has fewer files than the job has ranks: of the ranks that hold the same state,
only one writes a file. When the job is resumed, all ranks that held this state continue from that
file.

This module does not import MindSpore. The caller passes a function that writes the content of a
file, such as `lambda path: mindspore.save_checkpoint(cell, str(path))`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tft.errors import CheckpointCorrupt, OrderRefused, UsageError
from tft_mindspore import rank_files
from tft_mindspore.environment import Environment
from tft_mindspore.mindformers import Recipe
from tft_mindspore.rank_files import DIRECTORIES, Name

Groups = Sequence[Sequence[int]]
"""The ranks of a job in groups. All ranks of a group hold the same state. `Sizes.replicas` in
`tft_mindspore.mindformers` returns these groups."""

_DIRECTORY = DIRECTORIES[0]
_FEW = 8
"""The largest number of ranks that a message lists."""


def directory_of(root: Path, rank: int) -> Path:
    """
    Return the directory with the files of a rank. `root` is the directory with the directories of
    all ranks, such as `checkpoint`.
    """
    return root / _DIRECTORY.format(rank)


# ---------------------------------------------------------------- ranks that write


def savers(
    groups: Groups, gone: Collection[int] = (), *, everyone: bool = False
) -> tuple[int, ...]:
    """
    Return the ranks that write a last checkpoint: from each group of ranks with the same state, the
    lowest rank that is not lost. `gone` contains the lost ranks.

    With `everyone=True`, return all ranks that are not lost. Raises `OrderRefused` if all ranks of
    a group are lost.
    """
    left = [[rank for rank in sorted(group) if rank not in gone] for group in groups]
    for group, there in zip(groups, left, strict=True):
        if not there:
            raise OrderRefused(
                f"no complete checkpoint can be written: {_ranks(group)} are lost, and no other "
                "rank holds the same state"
            )
    return tuple(sorted(rank for there in left for rank in (there if everyone else there[:1])))


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """
    The checkpoint files that one run of the job writes for one rank.
    """

    root: Path
    rank: int
    prefix: str
    again: int = 0
    """The number of earlier runs that have written files with this prefix for the rank. File names
    contain this number, so that the names of different runs differ."""

    @property
    def directory(self) -> Path:
        """
        The directory with the files of the rank.
        """
        return directory_of(self.root, self.rank)

    def name(self, epoch: int, step: int) -> Name:
        """
        Return the name of the file with the state at the end of a step.

        `step` counts within the epoch. If the job has a `sink_size` of 1, MindSpore treats every
        step as an epoch with one step.
        """
        return Name(prefix=self.prefix, rank=self.rank, again=self.again, epoch=epoch, step=step)

    def save(self, epoch: int, step: int, write: Callable[[Path], object]) -> Path:
        """
        Write a file with the function `write`, and return its path.

        The file gets its name only when its whole content is on the disk. Call `note` afterwards,
        to record that the file is the newest. A file of the same step that this run wrote before is
        replaced.
        """
        path = self.directory / str(self.name(epoch, step))
        rank_files.put(path, write)
        return path

    def note(self, epoch: int, step: int) -> Path:
        """
        Record in `meta.json` that the file with the state at the end of this step is the newest.
        Return the path of `meta.json`.
        """
        rank_files.write_meta(self.directory, self.name(epoch, step))
        return self.directory / rank_files.META


def open_series(root: Path, rank: int, prefix: str) -> Series:
    """
    Return the series of files for a new run. The names in this series differ from the names of all
    existing files.

    Raises `UsageError` for a prefix that cannot be part of a file name.
    """
    if not prefix or "/" in prefix or "\0" in prefix or prefix.startswith("."):
        raise UsageError(
            f"the prefix {prefix!r} of checkpoints must be a name that does not begin with a dot, "
            "and not a path"
        )
    there = [
        name.again
        for name in rank_files.names(directory_of(root, rank), rank)
        if (name.prefix, name.rank) == (prefix, rank)
    ]
    return Series(root=root, rank=rank, prefix=prefix, again=max(there, default=-1) + 1)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    A checkpoint that `find` has found: all ranks can continue from it.
    """

    epoch: int
    step: int
    files: Mapping[int, Path]
    """The file from which each rank continues: its own file, or the file of a rank that held the
    same state."""
    written: tuple[int, ...]
    """The ranks that have written a file."""
    passed_over: tuple[tuple[int, int], ...] = ()
    """Epoch and step of each newer checkpoint that is incomplete, because a file was lost or was
    never written."""

    @property
    def last(self) -> bool:
        """
        True if this is a last checkpoint, which only the ranks that survived a fault have written,
        so that not every rank has a file.
        """
        return len(self.written) < len(self.files)


def resumption(recipe: Recipe, asked: Environment) -> Found | None:
    """
    Return the checkpoint from which a job continues. Return None if the job begins at its first
    step. `recipe` has the settings of the job, and `asked` has the features that the environment of
    the job requests.

    Raises `UsageError` and `CheckpointCorrupt` in the same cases as `find`. Also raises
    `UsageError` if `resume_training` is not the name of a checkpoint file.
    """
    if not recipe.resume or recipe.load is None:
        return None
    only = None
    if recipe.resume_file is not None:
        named = rank_files.read_name(recipe.resume_file)
        if named is None:
            raise UsageError(
                f"resume_training is {recipe.resume_file!r}; expected is True, or the name of a "
                f"file such as {Name(prefix=recipe.prefix or 'CKP', rank=0, epoch=5, step=1)}"
            )
        only = named.at
    return find(
        recipe.load,
        recipe.sizes.replicas(),
        high_availability=asked.last_checkpoints,
        only=only,
    )


def find(
    root: Path,
    groups: Groups,
    *,
    high_availability: bool,
    only: tuple[int, int] | None = None,
) -> Found:
    """
    Return the newest checkpoint for which every group of ranks with the same state has a file. With
    `only`, return the checkpoint of that epoch and step.

    With `high_availability`, a rank without a file continues from the file of another rank of its
    group. A newer checkpoint for which some group has no file is ignored.

    Raises `UsageError` if no checkpoint exists. Raises `UsageError` if some rank has no file of the
    newest checkpoint and `high_availability` is off. Raises `CheckpointCorrupt` if for every
    checkpoint some group has no file.
    """
    ranks = sorted(rank for group in groups for rank in group)
    _check_world(root, ranks)
    held = {rank: dict(_believed(root, rank)) for rank in ranks}
    steps = sorted({at for files in held.values() for at in files}, reverse=True)
    if only is not None:
        steps = [at for at in steps if at == only]
    if not steps:
        what = "checkpoint" if only is None else f"file of {_at(only)}"
        raise UsageError(
            f"the directory {root} has no {what} to continue from: expected are subdirectories "
            f"such as {_DIRECTORY.format(ranks[0])}, each with a {rank_files.META} and the file "
            "that it names"
        )
    for passed, at in enumerate(steps):
        written = tuple(rank for rank in ranks if at in held[rank])
        if not high_availability and len(written) < len(ranks):
            raise _without(root, at, sorted(set(ranks) - set(written)))
        files = _covered(groups, held, at)
        if files is not None:
            return Found(
                epoch=at[0],
                step=at[1],
                files=files,
                written=written,
                passed_over=tuple(steps[:passed]),
            )
    lost = next(group for group in groups if not any(steps[0] in held[rank] for rank in group))
    raise CheckpointCorrupt(
        f"the checkpoints in {root} are complete for no step: for {_at(steps[0])}, {_ranks(lost)} "
        "have no usable file, and no other rank held the same state"
    )


def _believed(root: Path, rank: int) -> Iterator[tuple[tuple[int, int], Path]]:
    """
    Yield the reliable checkpoint files of a rank, the oldest first, each with its epoch and step.

    Reliable are the file that `meta.json` names, and older files with the same prefix that are not
    of a later step. A file that is newer than the file in `meta.json` is left out: the run may have
    ended before that file was complete. A file that the function `damage` finds damaged is left out
    too.
    Nothing is yielded if `meta.json` is missing or names no file of the rank.
    """
    directory = directory_of(root, rank)
    noted = rank_files.read_meta(directory)
    if noted is None or noted.rank != rank:
        return
    for name in sorted(rank_files.names(directory, rank), key=lambda name: name.age):
        before = name.age <= noted.age and name.at <= noted.at
        if name.rank == rank and name.prefix == noted.prefix and before:
            path = directory / str(name)
            if not rank_files.damage(path):
                yield name.at, path


def _covered(
    groups: Groups, held: Mapping[int, Mapping[tuple[int, int], Path]], at: tuple[int, int]
) -> dict[int, Path] | None:
    """
    Return the file from which each rank continues at the epoch and step in `at`. `held` has the
    files of each rank. A rank that has not written a file gets the file of another rank of its
    group. Return None if there is a group of which no rank has written a file.
    """
    files: dict[int, Path] = {}
    for group in groups:
        there = [rank for rank in sorted(group) if at in held[rank]]
        if not there:
            return None
        files |= {rank: held[rank if rank in there else there[0]][at] for rank in group}
    return files


def _check_world(root: Path, ranks: Sequence[int]) -> None:
    """
    Raise `UsageError` if the checkpoint belongs to a job with other ranks. That is the case if
    there are files under the directory `root` for a rank that is not in `ranks`.
    """
    before, behind = _DIRECTORY.split("{}")
    for directory in sorted(root.glob(f"{before}*{behind}")):
        number = directory.name.removeprefix(before)
        if number.isdecimal() and int(number) not in ranks and any(directory.iterdir()):
            raise UsageError(
                f"the checkpoint has a directory {directory}, but this job has {len(ranks)} ranks, "
                f"none of them rank {number}: continue from the checkpoint of a job with the same "
                "number of ranks"
            )


def _without(root: Path, at: tuple[int, int], ranks: Sequence[int]) -> UsageError:
    have = "has" if len(ranks) == 1 else "have"
    return UsageError(
        f"{_ranks(ranks)} {have} no file of {_at(at)} in {root}: it is a last checkpoint, of "
        "which one rank of each group of replicas has a file, and can be resumed with high "
        "availability on, as by MS_ENABLE_TFT={TTP:1}"
    )


def _at(at: tuple[int, int]) -> str:
    epoch, step = at
    return f"step {step} of epoch {epoch}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_FEW]))
    more = f" and {len(ranks) - _FEW} more" if len(ranks) > _FEW else ""
    return f"ranks {named}{more}"
