"""
Functions that a session calls after steps, such as evaluations.
"""

import math
from collections.abc import Callable

import pluggy
import pytest

from tft.errors import UsageError
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.worker.after import AfterSteps


class Adaptor:
    """
    An adaptor with a random generator and a data position: numbers that grow with each draw and
    each batch.
    """

    def __init__(self) -> None:
        self.drawn = self.taken = 0
        self.state = {"dense": {"model": "a", "description": "b"}}

    @hookimpl
    def tft_set_aside(self) -> Callable[[], None]:
        before = self.drawn

        def put_back() -> None:
            self.drawn = before

        return put_back

    @hookimpl
    def tft_generators(self) -> dict[str, str]:
        return {"torch": str(self.drawn), "data": str(self.taken)}

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Return the digests of the state that the adaptor holds.
        """
        return {shard: dict(parts) for shard, parts in self.state.items()}


def functions(adaptor: object) -> AfterSteps:
    """
    Return the functions after steps of a rank with this adaptor.
    """
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(adaptor)
    return AfterSteps(plugins.hook)


def test_functions_are_due_at_their_interval() -> None:
    """When one function is registered for every step and another for every third step, then both
    are due after the third step. The time limit is the sum of both limits."""
    after = functions(Adaptor())
    assert after.limit == 0.0
    steps: list[int] = []
    after.add(steps.append, 1, 5.0)
    after.add(print, 3, 10.0)
    assert [[each.every for each in after.due(step)] for step in (1, 2, 3)] == [[1], [1], [1, 3]]
    assert after.limit == 15.0


def test_random_draws_of_a_function_are_undone() -> None:
    """When a function draws random numbers, then the generator state is restored afterwards, also
    if the function fails."""
    adaptor = Adaptor()
    after = functions(adaptor)

    def draws(step: int) -> None:
        adaptor.drawn += step
        if step == 2:
            raise ValueError("it fails")

    after.add(draws, 1, 5.0)
    after.call(after.due(1)[0], 1, adaptor.digests)
    assert adaptor.drawn == 0
    with pytest.raises(ValueError, match="it fails"):
        after.call(after.due(2)[0], 2, adaptor.digests)
    assert adaptor.drawn == 0


def test_a_function_that_changes_the_state_is_refused() -> None:
    """When a function changes the state of the rank, then an error names the function, the changed
    part, the shard and the step."""
    adaptor = Adaptor()
    after = functions(adaptor)

    def averages(step: int) -> None:
        adaptor.state["dense"]["model"] = str(step)

    after.add(averages, 1, 5.0)
    with pytest.raises(
        UsageError, match=r"averages has changed model of shard 'dense' after step 4"
    ):
        after.call(after.due(4)[0], 4, adaptor.digests)


def test_a_function_that_moves_the_data_position_is_refused() -> None:
    """When a function takes a batch from the adopted data, then an error names the function and
    says to use another loader. This holds in every call, and random draws are undone as well."""
    adaptor = Adaptor()
    after = functions(adaptor)

    def estimates(step: int) -> None:
        adaptor.drawn += 1
        adaptor.taken += step == 3

    after.add(estimates, 1, 5.0)
    after.call(after.due(1)[0], 1, adaptor.digests)
    after.call(after.due(2)[0], 2, adaptor.digests)
    with pytest.raises(UsageError, match=r"estimates has moved .* data after step 3.* of its own"):
        after.call(after.due(3)[0], 3, adaptor.digests)
    assert adaptor.drawn == 0


def test_invalid_function_registration_is_refused() -> None:
    """When a registered object is not a function, has an interval or limit of zero, or is
    registered already, then the registration is refused."""
    after = functions(Adaptor())
    after.add(print, 1, 1.0)
    for function, every, limit in (
        (7, 1, 1.0),
        (len, 0, 1.0),
        (len, 1, 0.0),
        (len, 1, math.inf),
        (print, 2, 1.0),
    ):
        with pytest.raises(UsageError):
            after.add(function, every, limit)  # type: ignore[arg-type]  # invalid on purpose
    assert len(after.due(1)) == 1
