"""
The plugin that judges the numbers of each step: which values it refuses, and what it remembers.
"""

import json
from collections.abc import Mapping
from typing import Any

import click
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs
from tft_numerics import VARIABLE, tft_environment, tft_opened, tft_options
from tft_numerics.history import WARM, WINDOW, History
from tft_numerics.judge import Judge, Settings

from tests.plugins.view import View
from tft.errors import UsageError
from tft.spi import Numbers, TrainingFault

NAN, INF = float("nan"), float("inf")


def judge(view: View | None = None, **settings: Any) -> Judge:  # Any: each setting's own type
    """
    Return a judge that refuses.
    """
    return Judge(view or View(), Settings(**{"mode": "refuse", **settings}))


def train(one: Judge, first: int, steps: int, norm: float = 1.0) -> None:
    """
    Let the judge see steps with values that vary by a tenth.
    """
    for step in range(first, first + steps):
        value = 1 + 0.1 * (step % 3 - 1)
        assert not one.tft_on_loss(step, 3 * value)
        one.tft_on_window_opening(step, Numbers(losses=(3 * value,), norm=norm * value))


# ---------------------------------------------------------------- spikes


@pytest.mark.parametrize("wrong", [NAN, INF])
def test_number_that_is_not_finite_hides_no_later_spike(wrong: float) -> None:
    """When a loss was NaN or Inf and training went on, then a later spike is still found."""
    history = History()
    for step in range(WARM):
        history.add(step, 1.0)
        history.add(step, wrong)
    assert history.limit(1.01, 20.0) is None
    assert history.limit(100.0, 20.0) is not None


def test_value_far_above_the_median_is_a_spike() -> None:
    """When a value is more than 20 deviations above the median, then it is a spike. A value that is
    a few deviations above it, or far below it, is none."""
    history = History()
    for step in range(WARM):
        history.add(step, 3 + 0.1 * (step % 5))
    assert history.limit(5.0, 20) is None
    assert history.limit(-100.0, 20) is None
    limit = history.limit(100.0, 20)
    assert limit is not None
    assert 5 < limit < 10


def test_nothing_is_a_spike_in_the_first_steps() -> None:
    """When there are fewer than 50 values, then no value is a spike."""
    history = History()
    for step in range(WARM - 1):
        history.add(step, 3.0)
    assert history.limit(1e9, 20) is None
    history.add(WARM, 3.0)
    assert history.limit(1e9, 20) is not None


def test_nothing_is_a_spike_beside_values_of_zero() -> None:
    """When all values are zero, then no deviation is known, and no value is a spike."""
    history = History()
    for step in range(WINDOW):
        history.add(step, 0.0)
    assert history.limit(1.0, 20) is None


def test_two_histories_agree_after_a_rollback() -> None:
    """When one rank has seen a step more than another, and both are brought back, then they have
    the same limit, although old values were dropped."""
    ahead, behind = History(), History()
    for step in range(1, 5 * WINDOW):
        value = 3 + (step * 7919 % 101) / 100
        ahead.add(step, value)
        if step < 5 * WINDOW - 1:
            behind.add(step, value)
    for history in (ahead, behind):
        history.back_to(5 * WINDOW - 20)
    assert ahead.limit(1e9, 20) == behind.limit(1e9, 20)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_loss_that_is_not_finite_is_refused_at_once(loss: float) -> None:
    """When the first loss of a job is not finite, then the judge refuses it before the backward
    pass, and gives the reason before the update."""
    one = judge()
    assert one.tft_on_loss(1, loss)
    with pytest.raises(TrainingFault, match=r"the loss is .*in step 1") as raised:
        one.tft_on_window_opening(1, Numbers(losses=(loss,), norm=NAN))
    assert raised.value.kind == "numeric"


def test_norm_that_is_not_finite_is_refused_on_every_rank() -> None:
    """When the norm of the gradients is not finite, then the judge refuses the update. The reason
    says whether this rank has computed such a gradient alone."""
    with pytest.raises(TrainingFault, match="the norm of the gradients is not finite"):
        judge().tft_on_window_opening(1, Numbers(losses=(3.0,), norm=NAN, own=(1.0,)))
    with pytest.raises(TrainingFault, match="this rank has computed alone"):
        judge().tft_on_window_opening(1, Numbers(losses=(3.0,), norm=NAN, own=(NAN,)))


def test_gradients_that_are_left_to_the_script_are_not_judged() -> None:
    """When the norm is left to a GradScaler, then nothing is refused, even if a gradient of this
    rank has overflowed."""
    judge().tft_on_window_opening(1, Numbers(losses=(3.0,), norm=None, own=(INF,)))


def test_norm_above_the_limit_is_refused_without_a_history() -> None:
    """When the norm is larger than the limit of the settings, then the judge refuses it in the
    first step. A norm of exactly the limit is accepted."""
    one = judge(limit=3.0)
    one.tft_on_window_opening(1, Numbers(norm=3.0))
    with pytest.raises(TrainingFault, match="--numerics-limit is 3"):
        one.tft_on_window_opening(2, Numbers(norm=3.5))


def test_spikes_are_refused() -> None:
    """When a loss or a norm is far above the last ones, then it is refused. With factor 0 it is
    accepted."""
    one, other = judge(), judge(spike=0.0)
    for each in (one, other):
        train(each, 1, WARM)
    assert one.tft_on_loss(WARM + 1, 300.0)
    assert not other.tft_on_loss(WARM + 1, 300.0)
    one.tft_on_order("regroup", 1, WARM + 1)
    with pytest.raises(TrainingFault, match="a spike begins at"):
        one.tft_on_window_opening(WARM + 1, Numbers(losses=(3.0,), norm=100.0))
    other.tft_on_window_opening(WARM + 1, Numbers(losses=(3.0,), norm=100.0))


def test_losses_of_several_backward_passes_are_judged_apart() -> None:
    """When a step has two losses of different size, each with a backward pass of its own, then each
    is compared with the losses at its place in earlier steps."""
    one = judge()
    for step in range(1, WARM + 1):
        assert not one.tft_on_loss(step, 1.0)
        assert not one.tft_on_loss(step, 50.0 + step % 3)
        one.tft_on_window_opening(step, Numbers(losses=(1.0, 50.0 + step % 3), norm=1.0))
    assert not one.tft_on_loss(WARM + 1, 1.0)
    assert not one.tft_on_loss(WARM + 1, 55.0)
    one.tft_on_order("regroup", 1, WARM + 1)
    assert not one.tft_on_loss(WARM + 1, 0.0)  # of a wrapper that is built
    one.tft_on_order("resume", 1, WARM + 1)
    assert one.tft_on_loss(WARM + 1, 55.0)


def test_refused_values_are_no_part_of_the_history() -> None:
    """When the same spike comes again after a refusal, then it is refused again."""
    one = judge()
    train(one, 1, WARM)
    for _ in range(3):
        with pytest.raises(TrainingFault):
            one.tft_on_window_opening(WARM + 1, Numbers(norm=100.0))
        one.tft_on_order("regroup", 1, WARM + 1)


def test_refused_loss_of_an_interrupted_step_is_forgotten() -> None:
    """When a step is interrupted after its loss was refused, then the next attempt is accepted."""
    one = judge()
    assert one.tft_on_loss(1, NAN)
    one.tft_on_order("regroup", 1, 1)
    one.tft_on_window_opening(1, Numbers(losses=(3.0,), norm=1.0))


def test_history_is_forgotten_on_all_ranks_when_a_process_is_replaced() -> None:
    """When an order names another process of some rank, then no norm is a spike until there are 50
    others, because the new process knows none. Without another process the history is kept."""
    view = View()
    one = judge(view)
    train(one, 1, WARM)
    one.tft_on_order("regroup", 1, WARM + 1)
    with pytest.raises(TrainingFault):
        one.tft_on_window_opening(WARM + 1, Numbers(norm=100.0))
    view.incarnations = {2: 1}
    one.tft_on_order("regroup", 2, WARM + 1)
    one.tft_on_window_opening(WARM + 1, Numbers(norm=100.0))


def test_watching_refuses_nothing_and_logs() -> None:
    """When the mode is `watch`, then a bad loss and a bad norm are logged, and nothing is
    refused."""
    one = judge(mode="watch")
    with capture_logs() as logs:
        assert not one.tft_on_loss(1, NAN)
        one.tft_on_window_opening(1, Numbers(losses=(NAN,), norm=NAN))
    assert [(entry["event"], entry["step"]) for entry in logs] == [("numbers_suspect", 1)]
    assert "the loss is nan" in logs[0]["why"]


# ---------------------------------------------------------------- the command line


def parsed(*words: str) -> Mapping[str, str]:
    """
    Return the environment that options of `tft run` lead to.
    """
    found: dict[str, str] = {}

    def run(**options: Any) -> None:  # Any: each option's own type
        found.update(tft_environment(options))

    command = click.Command("run", params=list(tft_options()), callback=run)
    result = CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return found


def test_plugin_costs_nothing_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no option is given, then no variable is set and no observer is made."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parsed() == {}
    assert tft_opened(View()) is None


def test_options_reach_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """When options are given, then the variable has them, and an observer is made from it."""
    carried = parsed("--numerics", "refuse", "--numerics-spike", "8", "--numerics-limit", "2.5")
    assert json.loads(carried[VARIABLE]) == {"mode": "refuse", "spike": 8.0, "limit": 2.5}
    monkeypatch.setenv(VARIABLE, carried[VARIABLE])
    one = tft_opened(View())
    assert isinstance(one, Judge)
    with pytest.raises(TrainingFault):
        one.tft_on_window_opening(1, Numbers(norm=2.6))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--numerics", "refuse", "--numerics-spike", "-1"), "0 or larger"),
        (("--numerics", "refuse", "--numerics-spike", "nan"), "0 or larger"),
        (("--numerics", "watch", "--numerics-limit", "0"), "larger than 0"),
        (("--numerics", "on"), "expected is off, watch or refuse"),
        (("--numerics-limit", "3"), "does nothing without --numerics"),
    ],
)
def test_options_without_sense_are_refused(words: tuple[str, ...], text: str) -> None:
    """When an option has a value that means nothing, then the run is refused with a sentence."""
    with pytest.raises(UsageError, match=text):
        parsed(*words)
