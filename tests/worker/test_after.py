"""
Functions that are called after steps.
"""

from collections.abc import Callable

import pluggy
import pytest

from tft.errors import UsageError
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.worker.after import AfterSteps


class Adaptor:
    """
    One that has a generator: a number that grows with each draw.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.state = {"dense": {"model": "a", "description": "b"}}

    @hookimpl
    def tft_set_aside(self) -> Callable[[], None]:
        before = self.drawn

        def put_back() -> None:
            self.drawn = before

        return put_back

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Of what it holds.
        """
        return {shard: dict(parts) for shard, parts in self.state.items()}


def functions(adaptor: object) -> AfterSteps:
    """
    Those of a rank with this adaptor.
    """
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(adaptor)
    return AfterSteps(plugins.hook)


def test_functions_are_due_as_often_as_was_said() -> None:
    """
    When one is to be called after every step and another after every third, then both are due after the third; they
    may take as long as both together.
    """
    after = functions(Adaptor())
    assert after.limit == 0.0
    steps: list[int] = []
    after.add(steps.append, 1, 5.0)
    after.add(print, 3, 10.0)
    assert [[each.every for each in after.due(step)] for step in (1, 2, 3)] == [[1], [1], [1, 3]]
    assert after.limit == 15.0


def test_what_a_function_draws_has_no_effect() -> None:
    """
    When a function draws, and even when it fails, then the generator is what it was.
    """
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
    """
    When a function changes what is held, then that is refused with its name and with what it has changed.
    """
    adaptor = Adaptor()
    after = functions(adaptor)

    def averages(step: int) -> None:
        adaptor.state["dense"]["model"] = str(step)

    after.add(averages, 1, 5.0)
    with pytest.raises(
        UsageError, match=r"averages has changed model of shard 'dense' after step 4"
    ):
        after.call(after.due(4)[0], 4, adaptor.digests)


def test_what_cannot_be_called_so_is_refused() -> None:
    """
    When something is no function, comes too often or never, or was given before, then it is refused.
    """
    after = functions(Adaptor())
    after.add(print, 1, 1.0)
    for function, every, limit in ((7, 1, 1.0), (len, 0, 1.0), (len, 1, 0.0), (print, 2, 1.0)):
        with pytest.raises(UsageError):
            after.add(function, every, limit)  # type: ignore[arg-type]  # what users may do
    assert len(after.due(1)) == 1
