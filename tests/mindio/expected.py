"""
The results that `program.py` computes in a job without faults.
"""

import array
import json

from tests.mindio.jobs import Outcome


def expected(world: int, steps: int) -> tuple[str, dict[tuple[int, int], set[str]]]:
    """
    Return the final state, and the losses by rank and step.
    """
    numbers = [0.0] * 100
    losses: dict[tuple[int, int], set[str]] = {}
    for step in range(1, steps + 1):
        told = []
        for rank in range(world):
            drawn = (rank + 1) * 0.37 + step * 0.11
            told.append(drawn + numbers[0])
            losses[rank, step] = {told[-1].hex()}
        total = json.loads(json.dumps(sum(told)))
        numbers = [total / (index + 1) for index in range(len(numbers))]
    return array.array("d", numbers).tobytes().hex(), losses


def assert_expected(outcome: Outcome, steps: int) -> None:
    """
    Check that the job succeeded with the results of a job without faults.
    """
    assert not any(outcome.codes), outcome.output
    finals, losses = expected(outcome.world, steps)
    assert outcome.finals() == {finals}
    assert outcome.losses() == losses
