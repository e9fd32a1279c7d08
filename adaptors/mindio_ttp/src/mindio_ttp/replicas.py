"""
Converts the groups of ranks that programs for the library MindIO set to shards of tft. Such a group
consists of the ranks that together hold one or more copies of a state.

If G ranks hold R whole copies of a state, the state is cut into G / R parts, which are the shards.
The rank with index p in the sorted group holds the part p modulo G / R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindio_ttp import checks, logs
from mindio_ttp.checks import Refused
from tft.spi import ShardCopies

CALL = "tft_set_optimizer_replica"
LARGEST = 2**31 - 1
"""The largest allowed value of `replica_shift`, the distance in a group between two ranks with the
same part of the state. The library MindIO ignores `replica_shift`, except for the framework X1
(environment variable TTP_FRAMEWORK_TYPE=1)."""

log = logs.get_logger()
announced = logs.get_logger(printed=True)
"""The logger for lines that also go to standard output. MindSpore's guides tell operators to look
for these lines in the output of worker 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """
    One group to which this rank belongs: the ranks that together hold one or more copies of a
    state. The state is that of the dense parameters or that of the experts.
    """

    type: int
    """The kind of state: 0 for dense parameters, 1 for experts. The number is the index of the
    group in the argument `replica_info` of `tft_set_optimizer_replica`."""
    ranks: tuple[int, ...]
    """The ranks of the group, sorted."""
    copies: int
    """The number of whole copies of the state that the ranks of the group hold together."""

    @property
    def parts(self) -> int:
        """
        The number of parts into which the state of the group is cut.
        """
        return len(self.ranks) // self.copies

    def shard(self, part: int) -> str:
        """
        Return the name of the shard that consists of the part number `part` of the state. The name
        is the same on every rank.
        """
        return f"group{self.type}.{self.ranks[0]}.{part}"

    def holders(self, part: int) -> tuple[int, ...]:
        """
        Return the ranks that hold a copy of the part number `part` of the state.
        """
        return self.ranks[part :: self.parts]

    def part_of(self, rank: int) -> int:
        """
        Return the number of the part of the state that `rank`, a rank of the group, holds.
        """
        return self.ranks.index(rank) % self.parts


def read(
    rank: int, world: int, info: Any, *, whole: bool, shifted: bool = True
) -> tuple[Group, ...]:  # Any: `info` is not checked yet
    """
    Return the groups of ranks to which `rank` belongs. `info` describes the groups: it is the
    argument `replica_info` of the function `tft_set_optimizer_replica`.

    Pass `whole=True` if each rank of a group must hold the whole state, as with MindSpore. Pass
    `shifted=True` if a wrong `replica_shift` (the distance between copies) is an error, as with the
    framework X1. With `shifted=False` a wrong distance is only logged. Raises `Refused` for groups
    that are not valid.
    """
    return tuple(
        _group(rank, world, place, group, whole=whole, shifted=shifted)
        for place, group in enumerate(checks.groups(info))
    )


def _group(
    rank: int, world: int, place: int, given: Mapping[str, Any], *, whole: bool, shifted: bool
) -> Group:
    ranks = checks.ranks(CALL, f"rank_list of group {place}", given["rank_list"], world)
    size = len(ranks)
    if rank not in ranks:
        raise Refused(
            f"{CALL}: rank {rank} is not in the rank_list of group {place}: {list(ranks)}"
        )
    copies = checks.number(CALL, f"replica_cnt of group {place}", given["replica_cnt"], 1, size)
    if whole and copies != size:
        raise Refused(
            f"{CALL}: with MindSpore, rank_list names the ranks that hold the same state, so "
            f"replica_cnt of group {place} must be its length {size}, not {copies}"
        )
    if size % copies:
        raise Refused(
            f"{CALL}: {size} ranks cannot hold {copies} whole copies (group {place}): the number "
            "of ranks must be a multiple of replica_cnt"
        )
    shift = checks.number(
        CALL, f"replica_shift of group {place}", given["replica_shift"], 0, LARGEST
    )
    if shift not in (0, size // copies):
        if shifted:
            raise Refused(
                f"{CALL}: replica_shift of group {place} is {shift}, but the copies are "
                f"{size // copies} places apart; 0 stands for this distance, too"
            )
        log.warning("replica_shift_ignored", group=place, shift=shift, used=size // copies)
    return Group(type=place, ranks=ranks, copies=copies)


def shards(rank: int, groups: Sequence[Group]) -> tuple[ShardCopies, ...]:
    """
    Return the shards that `rank` holds. In each of its `groups`, the rank holds one shard, which is
    a part of the state of the group.
    """
    return tuple(
        ShardCopies(shard=group.shard(part), ranks=group.holders(part))
        for group in groups
        for part in [group.part_of(rank)]
    )


def column(rank: int, world: int, partitions: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """
    Return the ranks that leave the job together with `rank`, this rank included.

    The ranks from 0 to `world` - 1 can be divided into groups in several ways. For each way,
    `partitions` has the group that contains `rank`. A rank leaves together with `rank` if in one of
    these ways it has the same index in its group as `rank` has in its group.

    Return None if the groups of the other ranks cannot be computed, because the given groups do not
    repeat regularly over all ranks.
    """
    together = {rank}
    for ranks in partitions:
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        block = stride * len(ranks)
        first = ranks[0]
        if tuple(ranks) != tuple(range(first, first + block, stride)):
            return None
        if world % block or first % block >= stride:
            return None
        place = rank % block // stride
        together |= {each for each in range(world) if each % block // stride == place}
    return tuple(sorted(together))


def disagreement(all_groups: Mapping[int, Sequence[Group]]) -> str:
    """
    Return a text that says how the groups that the ranks have set contradict each other. Return an
    empty text if the groups do not contradict each other.

    `all_groups` maps each rank to the groups that its program has set.
    """
    known: dict[tuple[int, int], tuple[int, Group]] = {}
    first, own = next(iter(all_groups.items()))
    for rank, groups in all_groups.items():
        if len(groups) != len(own):
            return (
                f"rank {first} has set {len(own)} kinds of groups, rank {rank} has set "
                f"{len(groups)}: all ranks must set the same number of groups"
            )
        for group in groups:
            for member in group.ranks:
                other, said = known.setdefault((group.type, member), (rank, group))
                if said != group:
                    return (
                        f"rank {other} says that group {group.type} is {list(said.ranks)} with "
                        f"{said.copies} copies, but rank {rank} says that it is "
                        f"{list(group.ranks)} with {group.copies} copies"
                    )
    return ""


def agreed_base(told: Mapping[int, int | None]) -> str:
    """
    Return a text that says which ranks count their steps differently. Return an empty text if the
    programs of all ranks give the same number to a step of the job.

    `told` maps each rank to its program's number for step 0 of the job. None means that the program
    has not counted any step yet. Ranks with None are ignored.
    """
    known = {rank: base for rank, base in told.items() if base is not None}
    if len(set(known.values())) < 2:
        return ""
    low, high = min(known, key=lambda rank: known[rank]), max(known, key=lambda rank: known[rank])
    return (
        f"the program's steps are not the same on all ranks: rank {high} is "
        f"{known[high] - known[low]} steps ahead of rank {low}, at the same step of the job; they "
        "must start from one checkpoint"
    )


def announce(
    told: Mapping[int, Sequence[Sequence[Any]]],
) -> None:  # Any: a group is a list of its type, its ranks and its number of copies
    """
    Log the groups of ranks that the programs have set, ordered by rank. `told` maps a rank to its
    groups, each as a list of its type, its ranks and its number of copies.

    Each group is logged once, for its lowest rank. The controller of the library MindIO, which runs
    in rank 0, logs the same text (`controller.cpp`, line 1905).
    """
    known: set[tuple[int, tuple[int, ...]]] = set()
    for rank, groups in sorted(told.items()):
        for place, (_, ranks, _) in enumerate(groups):
            group = (place, tuple(ranks))
            if group not in known:
                known.add(group)
                announced.info(f"rank:{rank}, report group list: {list(ranks)}")
