"""
Functions that a session calls after steps, such as evaluations.
"""

import math
from collections.abc import Callable, Sequence

import pluggy
import pytest

from tft.errors import Interrupted, UsageError
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


class Guarded(Adaptor):
    """
    An adaptor that can watch its state during a call, and compare its settings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.1
        self.writes = False
        self.rooms: list[int] = []

    @hookimpl
    def tft_guard(self, room: int) -> "Guarded":
        self.rooms.append(room)
        self.writes, self.before = False, self.rate
        return self

    def changed(self) -> Sequence[str]:
        """
        Return the changed settings.
        """
        return ["settings"] if self.rate != self.before else []

    def written(self) -> bool:
        """
        Return what the test has set.
        """
        return self.writes

    def end(self) -> None:
        """
        Do nothing.
        """


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


def test_changed_settings_are_refused_in_every_call() -> None:
    """When a function lowers a learning rate in a call in which the state is not digested, then an
    error names the settings."""
    adaptor = Guarded()
    after = functions(adaptor)

    def lowers(step: int) -> None:
        if step == 3:
            adaptor.rate *= 0.1

    after.add(lowers, 1, 5.0)
    (each,) = after.due(1)
    for step in (1, 2):
        after.call(each, step, adaptor.digests)
    each.cost = 1e9  # digests take so long that none are made in the third call
    with pytest.raises(UsageError, match=r"lowers has changed settings after step 3"):
        after.call(each, 3, adaptor.digests)
    assert adaptor.rooms[0] > 0
    assert adaptor.rooms[2] == 0
    assert not after.settle(adaptor.digests)


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("guarded", [True, False])
def test_state_that_a_broken_off_function_has_changed_does_not_count(
    guarded: bool, restores: bool
) -> None:
    """When an exception leaves a function that has changed the state, then the state does not
    count, unless the function has restored it."""
    adaptor = Guarded() if guarded else Adaptor()
    after = functions(adaptor)

    def swaps(step: int) -> None:
        if isinstance(adaptor, Guarded):
            adaptor.writes = True
        adaptor.state["dense"]["model"] = "average"
        try:
            if step == 2:
                raise Interrupted
        finally:
            if restores or step == 1:
                adaptor.state["dense"]["model"] = "a"

    after.add(swaps, 1, 5.0)
    (each,) = after.due(1)
    after.call(each, 1, adaptor.digests)
    assert each.writes == guarded
    with pytest.raises(Interrupted) as caught:
        after.call(each, 2, adaptor.digests)
    assert bool(getattr(caught.value, "__notes__", [])) == guarded
    assert after.settle(adaptor.digests) == (not restores)
    assert not after.settle(adaptor.digests)


@pytest.mark.parametrize("writes", [True, False])
def test_state_that_was_written_without_a_digest_does_not_count(writes: bool) -> None:
    """When an exception leaves a function in a call before which the state was not digested, then
    the state does not count if the function has written to it."""
    adaptor = Guarded()
    after = functions(adaptor)

    def fails(step: int) -> None:
        if step == 3:
            adaptor.writes = writes
            raise OSError("it fails")

    after.add(fails, 1, 5.0)
    (each,) = after.due(1)
    for step in (1, 2):
        after.call(each, step, adaptor.digests)
    each.cost = 1e9
    with pytest.raises(OSError, match="it fails"):
        after.call(each, 3, adaptor.digests)
    assert after.settle(adaptor.digests) == writes


def test_state_is_digested_as_often_as_time_allows() -> None:
    """When a function is called seldom, then the state is digested before each call; when digests
    take long, then only before the calls 1, 2, 4, 8 and so on."""
    adaptor = Adaptor()
    after = functions(adaptor)
    after.add(print, 1, 5.0)
    (each,) = after.due(1)
    looks: list[int] = []

    def digests() -> dict[str, dict[str, str]]:
        looks.append(each.calls)
        return adaptor.digests()

    for step in range(1, 10):
        each.cost = 0.0 if step < 4 else 1e9
        after.call(each, step, digests)
    assert looks == [1, 1, 2, 2, 3, 3, 4, 4, 8, 8]


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
