"""
From the sizes of a job's parallelism to its shard groups: which rank holds what, before anything
runs. The one place in the judgement that knows a parallelism by its name; what comes out is a
`Topology` like any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from tft.core.topology import Topology, strided
from tft.errors import UsageError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
"""Tensor, context, expert, data and pipeline parallelism, in the order in which Megatron counts
ranks unless it is told otherwise: neighbours differ in the first. MindSpore's is the same: pipeline
stages outermost, then data, then tensors."""
WORLD = 1_000_000
"""Ten times the largest job anybody plans for; a world beyond it is a slip of the finger."""


Places = list[tuple[str, tuple[int, ...]]]
"""The data-parallel groups of all places in the model, each with what tells its place."""


class Scheme(Enum):
    """
    Whose optimizer it is that is cut.
    """

    MEGATRON = "megatron"
    """The optimizer state is cut, the parameters are whole on every rank of a data-parallel group.
    The state of experts has as many copies as that of what is dense."""
    MINDSPORE = "mindspore"
    """The parameters are cut together with their optimizer state, but for small ones. The state of
    experts is cut into as many shards as that of what is dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """
    One kind of state, and where it is.
    """

    kind: str
    what: str
    """What it consists of, in words."""
    copies: int
    groups: Mapping[str, tuple[int, ...]]
    """Shard to the ranks that hold a copy of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """
    The sizes of a job's parallelism, and how its ranks are counted. Raises `UsageError` for sizes
    that cannot be, and where some state would have no replica.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Experts are spread over so many of the dp * cp ranks of a dense group."""
    shards: int = 1
    """Into so many shards is the optimizer state of a dense group cut; 1: it is not cut."""
    order: tuple[str, ...] = DIMENSIONS
    """The dimensions, that in which neighbouring ranks differ first."""
    scheme: Scheme = Scheme.MEGATRON
    threshold_kb: int = 0
    """MindSpore leaves smaller parameters than this whole."""

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "shards"):
            if getattr(self, name) < 1:
                what = "optimizer shards" if name == "shards" else name
                raise UsageError(f"{what} is at least 1, not {getattr(self, name)}")
        if sorted(self.order) != sorted(DIMENSIONS):
            named = "-".join(self.order)
            raise UsageError(
                f"the order of the dimensions names each of {', '.join(DIMENSIONS)} once, as in "
                f"{'-'.join(DIMENSIONS)}, not {named}"
            )
        if self.world > WORLD:
            raise UsageError(f"a job has at most {WORLD} ranks, not {self.world}")
        self._check_dense()
        self._check_experts()

    # ------------------------------------------------------------ sizes

    @property
    def world(self) -> int:
        """
        How many ranks the job has.
        """
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dense(self) -> int:
        """
        How many ranks have the same place in the model: the size of a dense data-parallel group.
        """
        return self.dp * self.cp

    @property
    def dense_copies(self) -> int:
        """
        How many of them hold each shard of the optimizer state.
        """
        return self.dense // self.shards

    @property
    def expert(self) -> int:
        """
        How many ranks have the same experts: the size of an expert data-parallel group.
        """
        return self.dense // self.ep

    @property
    def expert_shards(self) -> int:
        """
        Into how many shards the optimizer state of an expert group is cut.
        """
        if self.shards == 1 or self.scheme is Scheme.MINDSPORE:
            return self.shards
        return self.expert // self.dense_copies

    @property
    def expert_copies(self) -> int:
        """
        How many ranks hold each of these shards.
        """
        return self.expert // self.expert_shards

    def coordinates(self, rank: int) -> dict[str, int]:
        """
        Where a rank stands in each dimension.
        """
        sizes = self._dense_sizes()
        at = {name: rank // far % sizes[name] for name, far in self._strides(sizes).items()}
        at["ep"] = rank // self._strides(self._expert_sizes())["ep"] % self.ep
        return at

    # ------------------------------------------------------------ what is where

    def states(self) -> tuple[State, ...]:
        """
        All kinds of state with their shard groups: per pipeline stage and tensor rank, and per
        part of the experts.
        """
        dense, experts = self._dense_places(), self._expert_places()
        if self.scheme is Scheme.MINDSPORE and self.shards > 1:
            return self._with_parameters(dense, experts)
        found = [
            self._state("dense", "parameters", dense, self.dense),
            self._state("optimizer", "optimizer state", dense, self.dense_copies),
        ]
        if experts:
            found += [
                self._state("expert", "parameters of experts", experts, self.expert),
                self._state(
                    "expert_optimizer", "optimizer state of experts", experts, self.expert_copies
                ),
            ]
        return tuple(found)

    def _with_parameters(self, dense: Places, experts: Places) -> tuple[State, ...]:
        """
        Where parameters are cut with their optimizer state.
        """
        found = []
        if self.threshold_kb:
            small = f"parameters of less than {self.threshold_kb} KB, with their optimizer state"
            found.append(self._state("small", small, dense, self.dense))
        what = "parameters with their optimizer state"
        found.append(self._state("optimizer", what, dense, self.dense_copies))
        if experts:
            of = f"{what}, of experts"
            found.append(self._state("expert_optimizer", of, experts, self.expert_copies))
        return tuple(found)

    def _state(self, kind: str, what: str, places: Places, copies: int) -> State:
        groups: dict[str, tuple[int, ...]] = {}
        for place, ranks in places:
            groups |= strided(kind + place, ranks, copies)
        return State(kind=kind, what=what, copies=copies, groups=groups)

    def _dense_places(self) -> Places:
        strides = self._strides(self._dense_sizes())
        members = _spread((self.dp, strides["dp"]), (self.cp, strides["cp"]))
        return [
            (name, tuple(first + each for each in members))
            for name, first in self._model_places(strides)
        ]

    def _expert_places(self) -> Places:
        if self.ep == 1:
            return []
        strides = self._strides(self._expert_sizes())
        members = _spread((self.expert, strides["dp"]))
        return [
            (f"{name}.{part}", tuple(first + part * strides["ep"] + each for each in members))
            for name, first in self._model_places(strides)
            for part in range(self.ep)
        ]

    def _model_places(self, strides: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """
        The pipeline stages and tensor ranks, each with the first of its ranks.
        """
        for stage in range(self.pp):
            for tensor in range(self.tp):
                yield self._place(stage, tensor), stage * strides["pp"] + tensor * strides["tp"]

    def _place(self, stage: int, tensor: int) -> str:
        """
        What tells the shards of one place in the model from those of another; nothing where there
        is only one.
        """
        of_stage = f".stage{stage}" if self.pp > 1 else ""
        of_tensor = f".tensor{tensor}" if self.tp > 1 else ""
        return of_stage + of_tensor

    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    def _expert_sizes(self) -> dict[str, int]:
        """
        Experts know no context parallelism: its ranks are data-parallel ranks to them.
        """
        return {"tp": self.tp, "cp": 1, "ep": self.ep, "dp": self.expert, "pp": self.pp}

    def _strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """
        How far apart two ranks are that differ by one in a dimension.
        """
        strides: dict[str, int] = {}
        width = 1
        for name in self.order:
            strides[name] = width
            width *= sizes[name]
        return strides

    # ------------------------------------------------------------ refusals

    def _check_dense(self) -> None:
        group = (
            f"a dense data-parallel group has {_ranks(self.dense)} (dp {self.dp} * cp {self.cp})"
        )
        if self.dense == 1:
            raise UsageError(f"no replica: {group}, and nobody else holds what that one holds")
        if self.dense % self.shards:
            raise UsageError(
                f"{group}, which cannot be divided into {self.shards} optimizer shards; "
                f"{_possible(self.dense)}"
            )
        if self.dense_copies == 1:
            raise UsageError(
                f"no replica: {group}, and of {self.shards} optimizer shards each is held once; "
                f"{_possible(self.dense)}"
            )

    def _check_experts(self) -> None:
        if self.ep == 1:
            return
        if self.dense % self.ep:
            raise UsageError(
                f"experts cannot be spread over ep {self.ep} of the {self.dense} ranks of a dense "
                f"data-parallel group (dp {self.dp} * cp {self.cp}): they cannot be divided"
            )
        dense, experts = self._strides(self._dense_sizes()), self._strides(self._expert_sizes())
        if self.pp > 1 and dense["pp"] != experts["pp"]:
            raise UsageError(
                f"counted {'-'.join(self.order)}, the pipeline stages of experts (ep {self.ep}) "
                f"are not those of what is dense (cp {self.cp})"
            )
        group = (
            f"an expert data-parallel group has {_ranks(self.expert)} ({self.dense} / ep {self.ep})"
        )
        if self.expert == 1:
            raise UsageError(f"no replica: {group}, and nobody else holds what that one holds")
        if self.shards > 1 and self.scheme is Scheme.MEGATRON and self.expert % self.dense_copies:
            raise UsageError(
                f"{group}, which cannot be divided by the {self.dense_copies} copies that the "
                "optimizer state has of what is dense"
            )
        if self.expert % self.shards and self.scheme is Scheme.MINDSPORE:
            raise UsageError(
                f"no replica: {group}, which cannot be divided into {self.shards} shards; "
                "MindSpore then cuts over all of them"
            )
        if self.expert_copies == 1:
            raise UsageError(
                f"no replica: {group}, and of {self.expert_shards} optimizer shards each is held "
                "once"
            )


def _spread(*dimensions: tuple[int, int]) -> list[int]:
    """
    How far the ranks of a group are from its first, for the sizes and strides of its dimensions.
    """
    members = [0]
    for size, stride in dimensions:
        members = [each + place * stride for place in range(size) for each in members]
    return sorted(members)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _possible(ranks: int) -> str:
    """
    The numbers of shards of which each has a replica.
    """
    several = [shards for shards in range(2, ranks // 2 + 1) if ranks % shards == 0]
    if not several:
        return "without optimizer shards each rank holds all of it"
    some = several if len(several) <= 8 else [*several[:7], several[-1]]
    return f"possible: {', '.join(map(str, some))}"


def topology(layout: Layout, ranks_per_node: int | None = None) -> Topology:
    """
    The shard groups of a layout; with `ranks_per_node`, the nodes of so many ranks, too, filled one
    after another. Raises `UsageError` where the last node would not be full.
    """
    groups = {shard: ranks for state in layout.states() for shard, ranks in state.groups.items()}
    if ranks_per_node is None:
        return Topology(groups=groups)
    if ranks_per_node < 1 or layout.world % ranks_per_node:
        raise UsageError(f"{layout.world} ranks do not fill nodes of {ranks_per_node} ranks each")
    return Topology(
        groups=groups, nodes={rank: rank // ranks_per_node for rank in range(layout.world)}
    )


def report_lines(topology: Topology) -> Iterator[str]:
    """
    For every rank, who holds a copy of what it holds with the fewest copies, in the form of
    MindIO's log: `rank:4, report group list: [0, 4]`. A rank has several lines where there are
    several such groups. MindIO prints a group once, for the rank that is the first to report it.
    """
    fewest: dict[int, list[tuple[int, ...]]] = {}
    for ranks in {tuple(sorted(set(ranks))): None for ranks in topology.groups.values()}:
        for rank in ranks:
            known = fewest.get(rank)
            if known is None or len(ranks) < len(known[0]):
                fewest[rank] = [ranks]
            elif len(ranks) == len(known[0]):
                known.append(ranks)
    for rank in sorted(fewest):
        for ranks in fewest[rank]:
            yield f"rank:{rank}, report group list: {list(ranks)}"
