"""
What replicas cost: bytes per parameter and rank of Adam in mixed precision.
"""

from dataclasses import dataclass
from enum import Enum

from tft.core.layout import Layout


class Gradients(Enum):
    """
    In what precision gradients are summed; parameters are fp16 or bf16.
    """

    HALF = "fp16/bf16"
    SINGLE = "fp32"


_WHOLE_AND_CUT = {Gradients.HALF: (4, 16), Gradients.SINGLE: (6, 12)}
"""Bytes per parameter: what every rank has, and what is cut with the optimizer state. Parameter and
gradient are 2 + 2 or 2 + 4. Adam adds a parameter and two moments in fp32, and a gradient in fp32
where there is none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """
    Of one parameter on one of the ranks that hold it, in bytes.
    """

    formula: str
    """How it comes about: what is whole, and what is cut over the data-parallel group."""
    total: float
    added: float
    """How much of it the copies are: with none the state would be cut over the whole group."""


def cost(gradients: Gradients, ranks: int, copies: int) -> Cost:
    """
    The cost where a data-parallel group of so many ranks holds so many copies of each shard.

    The formulas are those of MindIO TFT's replica optimizer for Megatron: 20 (18 with fp32
    gradients) where the optimizer is not distributed, 4 + 16/d (6 + 12/d) where it is, and
    4 + 32/d (6 + 24/d) with two copies; the same holds for any number of copies. A framework that
    cuts the parameters, too, as MindSpore does, needs less.
    """
    whole, cut = _WHOLE_AND_CUT[gradients]
    on_all = copies == ranks
    return Cost(
        formula=str(whole + cut) if on_all else f"{whole} + {cut * copies}/{ranks}",
        total=whole + cut * copies / ranks,
        added=cut * (copies - 1) / ranks,
    )


def dense_cost(layout: Layout, gradients: Gradients) -> Cost:
    """
    Of a parameter that every rank of its pipeline stage and tensor rank has.
    """
    return cost(gradients, layout.dense, layout.dense_copies)


def expert_cost(layout: Layout, gradients: Gradients) -> Cost:
    """
    Of a parameter of an expert.
    """
    return cost(gradients, layout.expert, layout.expert_copies)


def bytes_per_rank(
    layout: Layout, gradients: Gradients, parameters: float, of_experts: float
) -> tuple[float, float]:
    """
    The bytes that a rank needs for a model of so many parameters, `of_experts` of them in experts,
    and how many of these the copies are. The model is taken to be spread evenly.
    """
    places = layout.tp * layout.pp
    dense, expert = dense_cost(layout, gradients), expert_cost(layout, gradients)
    shared, own = (parameters - of_experts) / places, of_experts / (places * layout.ep)
    return (
        shared * dense.total + own * expert.total,
        shared * dense.added + own * expert.added,
    )
