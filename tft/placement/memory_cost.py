"""
Calculate how much memory the replicas of optimizer state need: bytes per parameter and rank, for
Adam in mixed precision.
"""

from dataclasses import dataclass
from enum import Enum

from tft.placement.layout import Layout


class Gradients(Enum):
    """
    The precision in which gradients are all-reduced. Parameters always are fp16 or bf16.
    """

    HALF = "fp16/bf16"
    SINGLE = "fp32"


_WHOLE_AND_CUT = {Gradients.HALF: (4, 16), Gradients.SINGLE: (6, 12)}
"""For each precision of the gradients, two numbers of bytes per parameter.

The first number is for the parameter and its gradient (2 + 2 or 2 + 4 bytes), which every rank
holds in full. The second number is for the optimizer state, which is divided among the ranks. The
optimizer state has a parameter and two moments in fp32, together 12 bytes. If gradients are not in
fp32 already, it also has a gradient in fp32, 4 more bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """
    The memory, in bytes, that one parameter of the model needs on one of the ranks that hold the
    parameter.
    """

    formula: str
    """The calculation of the total as text, such as `4 + 32/8`: the bytes that every rank holds in
    full, plus the rank's share of the bytes that are divided over the data-parallel group. If every
    rank holds everything, the text is one number."""
    total: float
    """The number of bytes that the parameter needs on one rank, with its gradient and its optimizer
    state."""
    added: float
    """How many bytes of the total would not be needed if each shard were held by one rank only."""


def cost(gradients: Gradients, ranks: int, copies: int) -> Cost:
    """
    Return the cost of one parameter if a data-parallel group of `ranks` ranks holds `copies` copies
    of each shard of the optimizer state.

    The formulas are those of the replica optimizer that the library MindIO TFT has for Megatron.
    Let d be the number of ranks. The cost in bytes is 20 (18 with fp32 gradients) if the optimizer
    is not distributed. It is 4 + 16/d (6 + 12/d) if the optimizer is distributed, and 4 + 32/d
    (6 + 24/d) with two copies. The same rule holds for any number of copies. A framework that also
    cuts the parameters, as MindSpore does, needs less.
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
    Return the cost of a parameter of the dense part of the model, on a rank that holds the
    parameter.
    """
    return cost(gradients, layout.dense, layout.dense_copies)


def expert_cost(layout: Layout, gradients: Gradients) -> Cost:
    """
    Return the cost of a parameter of an expert, on a rank that holds the parameter.
    """
    return cost(gradients, layout.expert, layout.expert_copies)


def bytes_per_rank(
    layout: Layout, gradients: Gradients, parameters: float, of_experts: float
) -> tuple[float, float]:
    """
    Return two numbers for a model: the bytes that one rank needs, and how many of these bytes are
    due to additional copies. The model has `parameters` parameters, of which `of_experts` belong to
    experts. The parameters are assumed to be spread evenly over the ranks.
    """
    places = layout.tp * layout.pp
    dense, expert = dense_cost(layout, gradients), expert_cost(layout, gradients)
    shared, own = (parameters - of_experts) / places, of_experts / (places * layout.ep)
    return (
        shared * dense.total + own * expert.total,
        shared * dense.added + own * expert.added,
    )
