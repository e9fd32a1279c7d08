"""
Derive from the sizes of a job's parallelism which rank will hold which shard, before the job runs.
The result is a `Topology` (the ranks of each shard), the class that a running job uses too. Only
this module and `memory_cost`, which computes memory from these sizes, know the kinds of parallelism
by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tft.core.plan.topology import Topology, strided
from tft.errors import UsageError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
"""Tensor, context, expert, data and pipeline parallelism, in the order in which Megatron counts
ranks by default: the ranks of one tensor-parallel group have successive numbers. MindSpore uses the
same order: the tensor rank changes fastest, and the pipeline stage changes slowest."""
WORLD = 1_000_000
"""The largest number of ranks that is accepted. A larger number is taken for a typing error,
because no job has more ranks."""


Places = list[tuple[str, tuple[int, ...]]]
"""The data-parallel groups of the model. Each group is a pair: a suffix for the names of shards,
which says what part of the model the group trains, and the ranks of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """
    How a framework cuts the optimizer state into shards.
    """

    name: str
    """The name of the framework, for messages."""
    cuts_parameters: bool
    """True if parameters are cut together with their optimizer state, except small ones. False: the
    parameters are whole on every rank of a data-parallel group."""
    experts_as_dense: bool
    """True if the state of experts is cut into as many shards as the state of the dense part of the
    model. False: the state of experts is cut into fewer shards, so that each shard has as many
    copies as a shard of the dense part."""


MEGATRON = Scheme(name="Megatron", cuts_parameters=False, experts_as_dense=False)
"""The distributed optimizer of Megatron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """
    One kind of training state, such as the optimizer state, and the ranks that hold it.
    """

    kind: str
    what: str
    """A text that says what the state consists of, for messages."""
    copies: int
    """The number of ranks that hold each shard of this kind."""
    groups: Mapping[str, tuple[int, ...]]
    """Maps the name of each shard to the ranks that hold a copy of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """
    The sizes of a job's parallelism, and the order in which its ranks are counted. Raises
    `UsageError` for impossible sizes, and if some state would have no replica.

    The dense part of the model is everything apart from experts. A dense data-parallel group has
    the dp * cp ranks that train the same piece of the dense part. An expert data-parallel group has
    the ranks that train the same experts.
    """

    dp: int = 1
    """The data-parallel size: the number of parts into which each batch is divided."""
    tp: int = 1
    """The tensor-parallel size: the number of ranks over which each layer of the model is cut."""
    pp: int = 1
    """The number of pipeline stages."""
    cp: int = 1
    """The context-parallel size: the number of ranks over which each sequence of tokens is cut."""
    ep: int = 1
    """The expert-parallel size: the number of ranks, out of the dp * cp ranks of a dense
    data-parallel group, over which experts are spread."""
    shards: int = 1
    """The number of shards into which the optimizer state of a dense data-parallel group is cut. 1:
    the optimizer state is not cut."""
    order: tuple[str, ...] = DIMENSIONS
    """The dimensions in the order in which ranks are counted. Ranks with successive numbers differ
    in the first dimension."""
    scheme: Scheme = MEGATRON
    threshold_kb: int = 0
    """Parameters smaller than this number of kilobytes are not cut, even if the scheme cuts
    parameters."""

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "shards"):
            if getattr(self, name) < 1:
                what = "optimizer shards" if name == "shards" else name
                raise UsageError(f"{what} must be at least 1, not {getattr(self, name)}")
        if sorted(self.order) != sorted(DIMENSIONS):
            named = "-".join(self.order)
            raise UsageError(
                f"the order of the dimensions must name each of {', '.join(DIMENSIONS)} once, "
                f"as in {'-'.join(DIMENSIONS)}, not {named}"
            )
        if self.world > WORLD:
            raise UsageError(f"a job has at most {WORLD} ranks, not {self.world}")
        self._check_dense()
        self._check_experts()

    # ------------------------------------------------------------ sizes and numbers of copies

    @property
    def world(self) -> int:
        """
        The number of ranks of the job.
        """
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dense(self) -> int:
        """
        The size of a dense data-parallel group: the number of ranks that train the same part of the
        model, apart from experts.
        """
        return self.dp * self.cp

    @property
    def dense_copies(self) -> int:
        """
        The number of ranks of a dense data-parallel group that hold each shard of the optimizer
        state.
        """
        return self.dense // self.shards

    @property
    def expert(self) -> int:
        """
        The size of an expert data-parallel group: the number of ranks that train the same experts.
        """
        return self.dense // self.ep

    @property
    def expert_shards(self) -> int:
        """
        The number of shards into which the optimizer state of an expert data-parallel group is cut.
        """
        if self.shards == 1 or self.scheme.experts_as_dense:
            return self.shards
        return self.expert // self.dense_copies

    @property
    def expert_copies(self) -> int:
        """
        The number of ranks of an expert data-parallel group that hold each shard of the optimizer
        state.
        """
        return self.expert // self.expert_shards

    def coordinates(self, rank: int) -> dict[str, int]:
        """
        Return the coordinate of a rank in each dimension (`tp`, `cp`, `ep`, `dp`, `pp`), counted
        from 0.
        """
        sizes = self._dense_sizes()
        at = {name: rank // far % sizes[name] for name, far in self._strides(sizes).items()}
        at["ep"] = rank // self._strides(self._expert_sizes())["ep"] % self.ep
        return at

    # ------------------------------------------------------------ which ranks hold which shard

    def states(self) -> tuple[StateKind, ...]:
        """
        Return all kinds of state, each with its shards and the ranks that hold each shard. The
        state of every pair of pipeline stage and tensor rank is cut into shards separately. The
        state of experts is also separate for each of the `ep` parts of the experts.
        """
        dense, experts = self._dense_places(), self._expert_places()
        if self.scheme.cuts_parameters and self.shards > 1:
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

    def _with_parameters(self, dense: Places, experts: Places) -> tuple[StateKind, ...]:
        """
        Return all kinds of state, for a framework that cuts parameters together with their
        optimizer state.
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

    def _state(self, kind: str, what: str, places: Places, copies: int) -> StateKind:
        groups: dict[str, tuple[int, ...]] = {}
        for place, ranks in places:
            groups |= strided(kind + place, ranks, copies)
        return StateKind(kind=kind, what=what, copies=copies, groups=groups)

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
        Yield two values for each pair of pipeline stage and tensor rank: the suffix of the names of
        the pair's shards, and the lowest rank that has this stage and this tensor rank.
        """
        for stage in range(self.pp):
            for tensor in range(self.tp):
                yield self._place(stage, tensor), stage * strides["pp"] + tensor * strides["tp"]

    def _place(self, stage: int, tensor: int) -> str:
        """
        Return the suffix of shard names for a pipeline stage and tensor rank. The suffix is empty
        if the job has only one stage and one tensor rank.
        """
        of_stage = f".stage{stage}" if self.pp > 1 else ""
        of_tensor = f".tensor{tensor}" if self.tp > 1 else ""
        return of_stage + of_tensor

    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    def _expert_sizes(self) -> dict[str, int]:
        """
        Return the sizes of the dimensions for experts. Experts have no context parallelism: the
        ranks of the context dimension count as data-parallel ranks.
        """
        return {"tp": self.tp, "cp": 1, "ep": self.ep, "dp": self.expert, "pp": self.pp}

    def _strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """
        Return, for each dimension, the difference between the numbers of two ranks whose
        coordinates in this dimension differ by one.
        """
        strides: dict[str, int] = {}
        width = 1
        for name in self.order:
            strides[name] = width
            width *= sizes[name]
        return strides

    # ------------------------------------------------------------ checks of the sizes

    def _check_dense(self) -> None:
        group = (
            f"a dense data-parallel group has {_ranks(self.dense)} (dp {self.dp} * cp {self.cp})"
        )
        if self.dense == 1:
            raise UsageError(
                f"no replica: {group}, and no other rank holds the same state: choose a larger dp"
            )
        if self.dense % self.shards:
            raise UsageError(
                f"{group}, which cannot be divided into {self.shards} optimizer shards of equal "
                f"size; {_possible(self.dense)}"
            )
        if self.dense_copies == 1:
            raise UsageError(
                f"no replica: {group}, and each of its {self.shards} optimizer shards is held by "
                f"one rank only; {_possible(self.dense)}"
            )

    def _check_experts(self) -> None:
        if self.ep == 1:
            return
        if self.dense % self.ep:
            raise UsageError(
                f"experts cannot be spread over ep {self.ep} of the {self.dense} ranks of a dense "
                f"data-parallel group (dp {self.dp} * cp {self.cp}): ep must divide the number of "
                "these ranks"
            )
        dense, experts = self._strides(self._dense_sizes()), self._strides(self._expert_sizes())
        if self.pp > 1 and dense["pp"] != experts["pp"]:
            raise UsageError(
                f"with the order of dimensions {'-'.join(self.order)}, the pipeline stages of "
                f"experts (ep {self.ep}) have other ranks than the stages of the dense part (cp "
                f"{self.cp}): put pp last in the order"
            )
        group = (
            f"an expert data-parallel group has {_ranks(self.expert)} ({self.dense} / ep {self.ep})"
        )
        if self.expert == 1:
            raise UsageError(
                f"no replica: {group}, and no other rank holds the same state: choose a smaller ep"
            )
        divided = self.expert % self.dense_copies == 0
        if self.shards > 1 and not (self.scheme.experts_as_dense or divided):
            raise UsageError(
                f"{group}, which cannot be divided by {self.dense_copies}, the number of copies "
                "of the dense part's optimizer state: choose another number of optimizer shards"
            )
        if self.expert % self.shards and self.scheme.experts_as_dense:
            raise UsageError(
                f"{group}, which cannot be divided into {self.shards} shards; {self.scheme.name} "
                "then shards over all ranks of the group, and no shard has a replica"
            )
        if self.expert_copies == 1:
            raise UsageError(
                f"no replica: {group}, and each of its {self.expert_shards} optimizer shards is "
                "held by one rank only: choose fewer optimizer shards"
            )


def _spread(*dimensions: tuple[int, int]) -> list[int]:
    """
    Return, sorted, the differences between the numbers of the ranks of a group and the number of
    the first rank. The group extends over one or more dimensions. Each argument is the size and the
    stride of one dimension.
    """
    members = [0]
    for size, stride in dimensions:
        members = [each + place * stride for place in range(size) for each in members]
    return sorted(members)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _possible(ranks: int) -> str:
    """
    Return a text for an error message: the numbers of shards into which the optimizer state of
    `ranks` ranks can be cut so that every shard has a replica.
    """
    several = [shards for shards in range(2, ranks // 2 + 1) if ranks % shards == 0]
    if not several:
        return "without optimizer shards each rank holds all of it"
    some = several if len(several) <= 8 else [*several[:7], several[-1]]
    return f"possible: {', '.join(map(str, some))}"


def topology(layout: Layout, ranks_per_node: int | None = None) -> Topology:
    """
    Return the topology of a layout, which says which ranks hold each shard. If `ranks_per_node` is
    given, the topology also says on which node each rank is: the first `ranks_per_node` ranks are
    on node 0, and so on. Raises `UsageError` if the last node would not be full.
    """
    groups = {shard: ranks for state in layout.states() for shard, ranks in state.groups.items()}
    if ranks_per_node is None:
        return Topology(groups=groups)
    if ranks_per_node < 1 or layout.world % ranks_per_node:
        raise UsageError(
            f"{layout.world} ranks do not fill nodes of {ranks_per_node} ranks each: the ranks of "
            f"a node must be a divisor of {layout.world}"
        )
    return Topology(
        groups=groups, nodes={rank: rank // ranks_per_node for rank in range(layout.world)}
    )


def report_lines(topology: Topology) -> Iterator[str]:
    """
    Yield lines that say, for every rank, which smallest group of ranks holds one of its shards.

    A rank has several lines if several of its groups have the smallest size. The lines have the
    form of the log of MindIO (a fault-tolerance library): `rank:4, report group list: [0, 4]`. In
    MindIO's own log a group appears only once, for the rank that reports the group first.
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
