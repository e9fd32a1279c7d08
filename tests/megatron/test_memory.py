"""
Tests of the bytes that training keeps alive: exact formulas, and the padding of Megatron's buffers.
"""

from pathlib import Path

import pytest

from tests.benchmarks.megatron_memory import LIMIT, RANKS, Row, measure, rows
from tft.placement.memory_cost import Gradients

TABLE = [pytest.param(row, id=f"{row.what}, {row.gradients.value}") for row in rows()]
SPARE = 8 << 10
"""The bytes of objects that do not grow with the model: the step count of each parameter, and
constants."""


@pytest.mark.soak
@pytest.mark.parametrize("row", TABLE)
def test_the_memory_of_a_rank_is_that_of_the_formula(row: Row, tmp_path: Path) -> None:
    """When a step is over, then the tensors on a rank are its 16-bit parameters and their
    gradients, with Megatron's padding, and its optimizer shard: masters, moments, and a gradient of
    each master if the gradients do not have 32 bits. The bytes per parameter are those of the
    formula."""
    half = row.gradients is Gradients.HALF
    held = measure(row, tmp_path / "run")
    assert len(held) == RANKS
    for each in held:
        # without a distributed optimizer, parameters are outside of the padded buffer
        parameters = 2 * (each.padded if row.instances else each.parameters)
        gradients = (2 if half else 4) * each.padded
        share = (16 if half else 12) * each.kept
        assert 0 <= each.bytes - (parameters + gradients + share) <= SPARE
        # each of about 30 parameters is padded, and the end of the buffer too
        assert each.padded - each.parameters <= 64 * 40
        assert abs(each.bytes / each.parameters / row.expected - 1) <= LIMIT
    copies = row.instances or RANKS
    assert sum(each.kept for each in held) == copies * held[0].parameters
