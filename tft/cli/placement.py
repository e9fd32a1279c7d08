"""
The output of `tft replicas` for a layout (the sizes of a job's parallelism): lines for people and
JSON for machines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tft.core.plan.topology import Topology
from tft.placement.layout import Layout, report_lines, topology
from tft.placement.memory_cost import Cost, Gradients, bytes_per_rank, dense_cost, expert_cost
from tft.placement.redundancy import (
    Survival,
    of_nodes,
    of_ranks,
    pairs_in_words,
    shortened,
    stretches,
)

SIZES = ("dp", "tp", "pp", "cp", "ep")
_FEW = 8
"""The number of shards of one kind of state, and the number of ranks of one shard, that are shown
without the option `--all`."""
_LINES = 64
"""The number of lines of `report_lines` (the smallest group of holders for each rank) that are
shown without the option `--all`. They fill a screen or two."""
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """
    The input of `tft replicas`: a layout, and what to compute for it.
    """

    layout: Layout
    ranks_per_node: int | None = None
    """The number of ranks on each node. None: the loss of nodes is not computed."""
    parameters: float = 0
    """The number of parameters of the whole model. 0: bytes per rank are not computed."""
    of_experts: float = 0
    """The number of the model's parameters that belong to experts."""


def in_words(asked: Question, *, everything: bool) -> Iterator[str]:
    """
    Yield the lines that `tft replicas` prints. Long lists are cut unless `everything` is True.
    """
    layout = asked.layout
    most = None if everything else _FEW
    placed = topology(layout, asked.ranks_per_node)
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in SIZES)
    yield f"{layout.world} ranks: {sizes}; counted {'-'.join(layout.order)}"
    yield "\nWho holds what:"
    yield from _held(layout, most)
    yield "\nWhat can be lost:"
    yield "  any one rank: yes, everything it holds is on another rank or node, too"
    yield from _two(of_ranks(placed), "rank", most)
    if asked.ranks_per_node is not None:
        yield from _nodes(placed, asked.ranks_per_node, most)
    yield "\nBytes per parameter and rank, with Adam and parameters in fp16 or bf16:"
    yield from _memory(asked)
    yield "\nFor each rank, who holds a copy of what it holds with the fewest copies:"
    lines = report_lines(placed)
    yield from islice(lines, None if everything else _LINES)
    if left := sum(1 for _ in lines):
        yield f"… {_counted(left, 'more line')}; --all shows them"


def _held(layout: Layout, most: int | None) -> Iterator[str]:
    for state in layout.states():
        several = _counted(len(state.groups), "shard")
        yield f"  {state.kind}: {state.what}; {several}, {state.copies} copies of each"
        for shard, ranks in islice(state.groups.items(), most):
            yield f"    {shard}: [{shortened(list(map(str, ranks)), most)}]"
        if most is not None and len(state.groups) > most:
            yield f"    … {len(state.groups) - most} more"


def _two(survival: Survival, what: str, most: int | None) -> Iterator[str]:
    """
    Yield lines that say which two ranks or nodes the job cannot lose together. `what` is `rank` or
    `node`.
    """
    besides = " of the others" if survival.alone else ""
    if not survival.pairs:
        yield f"  any two {what}s{besides}: yes, everything they hold is on a third, too"
        return
    several = len(survival.pairs)
    have = "has" if several == 1 else "have"
    (first, second), shard = next(iter(survival.pairs.items()))
    yield (
        f"  any two {what}s{besides}: all but {_counted(several, 'pair')} that {have} all copies "
        f"of something, as {first} and {second} have of {shard}:"
    )
    words = pairs_in_words(survival.pairs, what, most)
    for each in words[:most]:
        yield f"    {each}"
    if len(words) > len(words[:most]):
        yield f"    … and pairs at {len(words) - len(words[:most])} other distances"


def _nodes(placed: Topology, ranks_per_node: int, most: int | None) -> Iterator[str]:
    survival = of_nodes(placed)
    several = len(set(placed.nodes.values()))
    one = f"  any one of {_counted(several, 'node')} of {_counted(ranks_per_node, 'rank')}"
    if survival.alone:
        named = shortened(stretches(list(survival.alone)), most)
        node, shard = next(iter(survival.alone.items()))
        nodes = "node" if len(survival.alone) == 1 else "nodes"
        yield f"{one}: no, not {nodes} {named}; node {node} has all copies of {shard}"
    else:
        yield f"{one}: yes, everything it holds is on another rank or node, too"
    if several - len(survival.alone) > 1:
        yield from _two(survival, "node", most)


def _memory(asked: Question) -> Iterator[str]:
    costs = _costs(asked.layout)
    for gradients in Gradients:
        for what, cost in costs[gradients].items():
            of = f"{what}, " if len(costs[gradients]) > 1 else ""
            total = f"{cost.total:.4g}"
            sum_of = total if cost.formula == total else f"{cost.formula} = {total}"
            yield (
                f"  {of}gradients in {gradients.value}: {sum_of}, "
                f"{cost.added:.4g} of them for the copies"
            )
    scheme = asked.layout.scheme
    if scheme.cuts_parameters and asked.layout.shards > 1:
        yield f"  (as Megatron needs; {scheme.name} cuts the parameters, too, and needs less)"
    if asked.parameters:
        yield f"Of a model of {asked.parameters:.6g} parameters, a rank has:"
        for gradients in Gradients:
            total_bytes, added = _bytes(asked, gradients)
            yield (
                f"  gradients in {gradients.value}: {total_bytes / _GB:.4g} GB, "
                f"{added / _GB:.4g} GB of them for the copies"
            )


def _costs(layout: Layout) -> dict[Gradients, dict[str, Cost]]:
    return {
        gradients: {"dense": dense_cost(layout, gradients)}
        | ({"experts": expert_cost(layout, gradients)} if layout.ep > 1 else {})
        for gradients in Gradients
    }


def _bytes(asked: Question, gradients: Gradients) -> tuple[float, float]:
    return bytes_per_rank(asked.layout, gradients, asked.parameters, asked.of_experts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---------------------------------------------------------------- for machines


def as_json(asked: Question) -> dict[str, object]:
    """
    Return the output of `tft replicas` as JSON values. No list is cut.
    """
    layout = asked.layout
    placed = topology(layout, asked.ranks_per_node)
    said: dict[str, object] = {
        "world": layout.world,
        "sizes": {name: getattr(layout, name) for name in SIZES},
        "optimizer_shards": layout.shards,
        "order": "-".join(layout.order),
        "states": [
            {"kind": state.kind, "what": state.what, "copies": state.copies, "groups": state.groups}
            for state in layout.states()
        ],
        "ranks": _losses(of_ranks(placed)),
        "bytes_per_parameter": {
            gradients.value: {
                what: {"formula": cost.formula, "total": cost.total, "for_copies": cost.added}
                for what, cost in costs.items()
            }
            for gradients, costs in _costs(layout).items()
        },
    }
    if asked.ranks_per_node is not None:
        said["nodes"] = {"ranks_per_node": asked.ranks_per_node, **_losses(of_nodes(placed))}
    if asked.parameters:
        said["bytes_per_rank"] = {
            gradients.value: dict(
                zip(("total", "for_copies"), _bytes(asked, gradients), strict=True)
            )
            for gradients in Gradients
        }
    return said


def _losses(survival: Survival) -> dict[str, object]:
    return {
        "any_one": not survival.alone,
        "any_two": not survival.alone and not survival.pairs,
        "not_alone": list(survival.alone),
        "not_together": list(survival.pairs),
    }
