"""
Where the ranks of a MindSpore job have their checkpoints, in the layout of MindSpore Transformers, who
writes one, and which can be gone on from:

    checkpoint/rank_0/llama2_13b_rank_0-5_1.ckpt     the end of step 1 of epoch 5
    checkpoint/rank_0/meta.json                      names it, written after it
    checkpoint/rank_5/llama2_13b_rank_5-5_1.ckpt     rank 1 was lost, and held the same
    …

A checkpoint in which fewer files are than the job has ranks is a last one: one rank of each group of
replicas has written. The others go on from the file of theirs.

Knows no MindSpore: what is in a file is written by a function of the caller's, such as
`lambda path: mindspore.save_checkpoint(cell, str(path))`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tft import rankfiles
from tft.errors import CheckpointCorrupt, OrderRefused, UsageError
from tft.mindformers import Recipe
from tft.rankfiles import DIRECTORIES, Name
from tft_mindspore.environment import Environment

Groups = Sequence[Sequence[int]]
"""The ranks of a job, those together that hold the same: `Sizes.replicas` of `tft.mindformers`."""

_DIRECTORY = DIRECTORIES[0]
_FEW = 8
"""So many ranks are named one by one."""


def directory_of(root: Path, rank: int) -> Path:
    """
    Where the files of a rank are; `root` is the directory of all of them, `checkpoint`.
    """
    return root / _DIRECTORY.format(rank)


# ---------------------------------------------------------------- who writes


def savers(
    groups: Groups, gone: Collection[int] = (), *, everyone: bool = False
) -> tuple[int, ...]:
    """
    Who writes a last checkpoint: of each group the lowest rank that is there, or `everyone` who is.
    Raises `OrderRefused` where all of a group are gone.
    """
    left = [[rank for rank in sorted(group) if rank not in gone] for group in groups]
    for group, there in zip(groups, left, strict=True):
        if not there:
            raise OrderRefused(
                f"no complete checkpoint can be written: {_ranks(group)} are gone, and nobody else "
                "held what they did"
            )
    return tuple(sorted(rank for there in left for rank in (there if everyone else there[:1])))


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """
    What one run writes of one rank.
    """

    root: Path
    rank: int
    prefix: str
    again: int = 0
    """How many runs have written files of this prefix there before: it is in the names."""

    @property
    def directory(self) -> Path:
        """
        Where its files are.
        """
        return directory_of(self.root, self.rank)

    def name(self, epoch: int, step: int) -> Name:
        """
        The file of the end of a step. With a sink size of 1, MindSpore counts every step as an epoch of
        one step.
        """
        return Name(prefix=self.prefix, rank=self.rank, again=self.again, epoch=epoch, step=step)

    def save(self, epoch: int, step: int, write: Callable[[Path], object]) -> Path:
        """
        Have `write` write a file, which is in its place when all of it is on the disk. `note` makes it
        the newest. What the same run has written of that step before is replaced.
        """
        path = self.directory / str(self.name(epoch, step))
        rankfiles.put(path, write)
        return path

    def note(self, epoch: int, step: int) -> Path:
        """
        Have `meta.json` name a file that is in its place.
        """
        rankfiles.write_meta(self.directory, self.name(epoch, step))
        return self.directory / rankfiles.META


def open_series(root: Path, rank: int, prefix: str) -> Series:
    """
    What a run that begins is to write: names that no file has that is there. Raises `UsageError` for a
    prefix that is no part of a name.
    """
    if not prefix or "/" in prefix or "\0" in prefix or prefix.startswith("."):
        raise UsageError(
            f"the prefix {prefix!r} of checkpoints is to be a name that can be seen, not a path"
        )
    there = [
        name.again
        for name in rankfiles.names(directory_of(root, rank), rank)
        if (name.prefix, name.rank) == (prefix, rank)
    ]
    return Series(root=root, rank=rank, prefix=prefix, again=max(there, default=-1) + 1)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    A checkpoint that all ranks can go on from.
    """

    epoch: int
    step: int
    files: Mapping[int, Path]
    """By rank: its own file, or that of one that held the same."""
    written: tuple[int, ...]
    """The ranks that have a file of their own."""
    passed_over: tuple[tuple[int, int], ...] = ()
    """Epoch and step of what is newer, of which something was lost or never written."""

    @property
    def last(self) -> bool:
        """
        It is a last checkpoint: not every rank has written.
        """
        return len(self.written) < len(self.files)


def resumption(recipe: Recipe, asked: Environment) -> Found | None:
    """
    What a job of this file goes on from, in this environment; None where it is to begin. Raises as
    `find`.
    """
    if not recipe.resume or recipe.load is None:
        return None
    only = None
    if recipe.resume_file is not None:
        named = rankfiles.read_name(recipe.resume_file)
        if named is None:
            raise UsageError(
                f"resume_training is {recipe.resume_file!r}; expected is True, or the name of a file "
                f"as {Name(prefix=recipe.prefix or 'CKP', rank=0, epoch=5, step=1)}"
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
    The newest checkpoint that there is of all groups, or that of epoch and step `only`. With `high_availability` a rank without a file
    goes on from that of one that held the same, and what is not there of every group is passed over.
    Raises `UsageError` where there is none, or where the newest is a last checkpoint and
    `high_availability` is not on; `CheckpointCorrupt` where there is none of every group.
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
            f"{root} has no {what} to go on from: expected are directories as "
            f"{_DIRECTORY.format(ranks[0])}, each with a {rankfiles.META} and the file it names"
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
        f"{root} has no step of which every group has a file; of {_at(steps[0])} there is none of "
        f"{_ranks(lost)}, and nobody else held what they did"
    )


def _believed(root: Path, rank: int) -> Iterator[tuple[tuple[int, int], Path]]:
    """
    By epoch and step, the files of a rank that are whole: what its `meta.json` names, and what it has
    written before. What came after was cut off before it was noted. Those of later runs come last.
    """
    directory = directory_of(root, rank)
    noted = rankfiles.read_meta(directory)
    if noted is None or noted.rank != rank:
        return
    for name in sorted(rankfiles.names(directory, rank), key=lambda name: name.age):
        before = name.age <= noted.age and name.at <= noted.at
        if name.rank == rank and name.prefix == noted.prefix and before:
            path = directory / str(name)
            if not rankfiles.damage(path):
                yield name.at, path


def _covered(
    groups: Groups, held: Mapping[int, Mapping[tuple[int, int], Path]], at: tuple[int, int]
) -> dict[int, Path] | None:
    """
    The file of each rank, its own where it has one; None where a group has none.
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
    Raises `UsageError` where there are files of a rank that the job does not have.
    """
    before, behind = _DIRECTORY.split("{}")
    for directory in sorted(root.glob(f"{before}*{behind}")):
        number = directory.name.removeprefix(before)
        if number.isdecimal() and int(number) not in ranks and any(directory.iterdir()):
            raise UsageError(
                f"{directory} is there, and the job has {len(ranks)} ranks, none of them {number}: "
                "expected is the checkpoint of a job of the same sizes"
            )


def _without(root: Path, at: tuple[int, int], ranks: Sequence[int]) -> UsageError:
    have = "has" if len(ranks) == 1 else "have"
    return UsageError(
        f"{_ranks(ranks)} {have} no file of {_at(at)} in {root}: it is a last checkpoint, of which one "
        "rank of each group of replicas has a file, and is gone on from with high availability on, as "
        "by MS_ENABLE_TFT={TTP:1}"
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
