"""
The numbers of a step that the adaptor for PyTorch notes: losses, norms, and the refusal of a loss.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tft_pytorch.step_numbers import Watch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import (
    clip_grad,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

from tft.errors import UsageError
from tft.spi import Made


@pytest.fixture
def native() -> Iterator[None]:
    """
    Put torch's own functions back after the test.
    """
    backward, scale = torch.autograd.backward, GradScaler.scale
    names = "_get_total_norm", "_group_tensors_by_device_and_dtype"
    functions = {name: getattr(clip_grad, name) for name in names}
    yield
    torch.autograd.backward = backward
    GradScaler.scale = scale  # type: ignore[method-assign]
    for name, function in functions.items():
        setattr(clip_grad, name, function)


class Step:
    """
    A model, its optimizer, and a watch on their numbers.
    """

    def __init__(
        self, refuse: Callable[[float], bool] = lambda _: False, scaler: GradScaler | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        others = {} if scaler is None else {"scaler": scaler}
        made = Made(model=self.model, optimizer=self.optimizer, scheduler=None, others=others)
        self.seen: list[float] = []
        self.watch = Watch()

        def saw(loss: float) -> bool:
            self.seen.append(loss)
            return refuse(loss)

        self.watch.begin(saw, lambda: made)

    def loss(self, factor: float = 1.0) -> Tensor:
        """
        Return a loss.
        """
        loss: Tensor = self.model(torch.ones(2, 4)).square().mean() * factor
        return loss

    def norm(self) -> float:
        """
        Return the norm of the present gradients, computed in another way.
        """
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def backward(loss: Tensor) -> None:
    """
    Begin a backward pass.
    """
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here


@pytest.mark.usefixtures("native")
def test_numbers_are_those_of_the_backward_passes() -> None:
    """When a step has two backward passes, then its numbers have both losses, and the norm of the
    gradients that both have summed up. The next step begins with no numbers."""
    step = Step()
    losses = step.loss(), step.loss(2.0)
    for loss in losses:
        backward(loss)
    numbers = step.watch.take()
    assert list(numbers.losses) == step.seen == [loss.item() for loss in losses]
    assert numbers.norm == pytest.approx(step.norm())
    assert step.watch.take().losses == ()


@pytest.mark.usefixtures("native")
def test_norm_is_that_of_the_gradients_before_they_were_clipped() -> None:
    """When the script clips its gradients, then the norm is the one that the clipping has
    computed."""
    step = Step()
    backward(step.loss(1000.0))
    norm = step.norm()
    assert clip_grad_norm_(step.model.parameters(), 1.0).item() == step.watch.take().norm
    assert norm > 100
    assert step.norm() < 1.01


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("all_at_once", [True, False])
def test_norm_is_that_before_the_gradients_were_clipped_by_value(all_at_once: bool) -> None:
    """When the script clips each element of its gradients, at once or layer by layer, then the norm
    is that of all gradients before the first clipping."""
    step = Step()
    backward(step.loss(1000.0))
    norm = step.norm()
    for module in [step.model] if all_at_once else step.model:
        clip_grad_value_(module.parameters(), 0.1)
    assert norm > 100
    assert step.norm() < 1
    assert step.watch.take().norm == pytest.approx(norm)
    backward(step.loss())
    assert step.watch.take().norm == pytest.approx(step.norm())


@pytest.mark.usefixtures("native")
def test_norm_is_that_before_the_gradients_were_scaled_by_a_norm_of_the_script() -> None:
    """When the script computes the norm and clips with it in two calls, then the norm is the one
    before the clipping."""
    step = Step()
    backward(step.loss(1000.0))
    norm = step.norm()
    parameters = list(step.model.parameters())
    total = get_total_norm([each.grad for each in parameters if each.grad is not None])
    clip_grads_with_norm_(parameters, 1.0, total)
    assert step.norm() < 1.01
    assert step.watch.take().norm == pytest.approx(norm)


@pytest.mark.usefixtures("native")
def test_norm_is_that_of_all_gradients_when_only_some_are_clipped() -> None:
    """When the script clips the gradients of each layer, then the norm is that of all gradients
    before the first clipping."""
    step = Step()
    backward(step.loss(1000.0))
    norm = step.norm()
    for layer in step.model:
        clip_grad_norm_(layer.parameters(), 1.0)
    assert step.watch.take().norm == pytest.approx(norm)


@pytest.mark.usefixtures("native")
def test_norm_of_other_tensors_is_not_taken_for_that_of_the_gradients() -> None:
    """When the script computes the norm of its parameters, then the norm is still that of the
    gradients."""
    step = Step()
    backward(step.loss())
    torch.nn.utils.get_total_norm(list(step.model.parameters()))
    assert step.watch.take().norm == pytest.approx(step.norm())


@pytest.mark.usefixtures("native")
def test_refused_loss_makes_every_gradient_nan() -> None:
    """When a loss is refused, then all gradients of its backward pass are NaN, and the sum with an
    earlier pass is NaN too."""
    step = Step(refuse=lambda loss: loss > 100)
    backward(step.loss())
    backward(step.loss(1e6))
    grads = [p.grad for p in step.model.parameters() if p.grad is not None]
    assert len(grads) == 4
    assert all(bool(grad.isnan().all()) for grad in grads)
    numbers = step.watch.take()
    assert numbers.norm is not None
    assert math.isnan(numbers.norm)


@pytest.mark.usefixtures("native")
def test_accepted_step_has_the_same_gradients_as_without_the_watch() -> None:
    """When nothing is refused, then the gradients have the same bits as without the watch."""
    watched = Step()
    backward(watched.loss())
    plain = Step()
    found = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    for parameter, gradient in zip(watched.model.parameters(), found, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.usefixtures("native")
def test_numbers_of_a_grad_scaler_have_no_scale() -> None:
    """When a GradScaler scales the loss, then loss and norm are those without the scale, whether
    the gradients were unscaled before or not. A refused loss leaves the gradients as they are."""
    for unscaled in (True, False):
        scaler = GradScaler("cpu", init_scale=1024.0)
        step = Step(refuse=lambda _: True, scaler=scaler)
        loss = step.loss()
        backward(scaler.scale(loss))
        if unscaled:
            scaler.unscale_(step.optimizer)
        norm = step.norm() / (1 if unscaled else 1024)
        numbers = step.watch.take()
        (found,) = numbers.losses
        assert found == pytest.approx(loss.item())
        assert numbers.norm == pytest.approx(norm)


@pytest.mark.usefixtures("native")
def test_overflow_is_left_to_the_grad_scaler() -> None:
    """When the scale is too large, then the infinite loss is noted in its place and not judged, nor
    is a later loss of the step, and there is no norm."""
    scaler = GradScaler("cpu", init_scale=1e38)
    step = Step(scaler=scaler)
    backward(scaler.scale(step.loss(1e6)))
    later = scaler.scale(step.loss(1e-6))
    backward(later)
    numbers = step.watch.take()
    assert numbers.losses == (float("inf"), later.item() / scaler.get_scale())
    assert (numbers.norm, step.seen) == (None, [])


@pytest.mark.usefixtures("native")
def test_grad_scaler_that_was_not_handed_over_is_refused() -> None:
    """When the script scales its loss with a GradScaler that tft does not know, then it is told to
    hand it over. A disabled one is accepted."""
    step = Step()
    GradScaler("cpu", enabled=False).scale(step.loss())
    with pytest.raises(UsageError, match=r"others=.*scaler"):
        GradScaler("cpu").scale(step.loss())


@pytest.mark.usefixtures("native")
def test_numbers_of_an_unfinished_step_are_forgotten() -> None:
    """When a step is given up after its backward pass, then its numbers are gone."""
    step = Step()
    backward(step.loss())
    step.watch.forget()
    assert step.watch.take().losses == ()


@pytest.mark.usefixtures("native")
def test_numbers_of_the_tail_do_not_count_to_the_next_step() -> None:
    """When a backward pass runs in the tail of a step, then the numbers of the next step are without
    its loss and norm."""
    step = Step()
    backward(step.loss())
    step.watch.take()
    backward(step.loss(1000.0))
    clip_grad_norm_(step.model.parameters(), 1.0)
    step.watch.begin_step()
    step.optimizer.zero_grad()
    loss = step.loss()
    backward(loss)
    numbers = step.watch.take()
    assert numbers.losses == (loss.item(),)
    assert numbers.norm == pytest.approx(step.norm())


@pytest.mark.usefixtures("native")
def test_backward_from_a_vector_is_no_loss() -> None:
    """When a backward pass begins from a tensor and its gradient, as in a pipeline, then there is no
    loss, and the pass is not changed."""
    step = Step(refuse=lambda _: True)
    output = step.model(torch.ones(2, 4))
    torch.autograd.backward([output], [torch.ones_like(output)])
    numbers = step.watch.take()
    assert (numbers.losses, step.seen) == ((), [])
    assert numbers.norm == pytest.approx(step.norm())


class Beside(Step):
    """
    A model and a second one, a critic. The critic, its optimizer or both are among `others`. The
    optimizer of the model also has a parameter that is in no module.
    """

    def __init__(self, *handed: str) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.optimizer.add_param_group({"params": [self.scale]})
        all_others = {
            "critic": self.critic, "critics": torch.optim.SGD(self.critic.parameters(), lr=0.1),
        }  # fmt: skip
        others = {name: all_others[name] for name in handed}
        made = Made(model=self.model, optimizer=self.optimizer, scheduler=None, others=others)
        self.watch.begin(lambda _: False, lambda: made)

    def train(self, factor: float = 1.0) -> None:
        """
        Run both backward passes. The gradients of the critic are multiplied by `factor`.
        """
        backward(self.loss())
        backward(self.critic(torch.ones(2, 4)).square().mean())
        for parameter in self.critic.parameters():
            assert parameter.grad is not None
            parameter.grad[..., 0] *= factor


HANDED = [("critic",), ("critics",), ("critic", "critics")]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("handed", HANDED)
@pytest.mark.parametrize("clipped", ["", "norm", "value"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_wrong_gradients_of_a_second_model_are_in_the_norm(
    handed: tuple[str, ...], clipped: str, wrong: float
) -> None:
    """When a gradient of a second model is NaN or Inf, then the norm of the step is not finite, also
    if the script clips these gradients first. The next step has a norm again."""
    step = Beside(*handed)
    step.train(wrong)
    if clipped == "norm":
        clip_grad_norm_(step.critic.parameters(), 1.0)
    if clipped == "value":
        clip_grad_value_(step.critic.parameters(), 0.1)
    numbers = step.watch.take()
    assert numbers.norm is not None
    assert not math.isfinite(numbers.norm)
    step.critic.zero_grad()
    assert step.watch.take().norm == pytest.approx(step.norm())


@pytest.mark.usefixtures("native")
def test_wrong_gradient_of_a_parameter_in_no_module_is_in_the_norm() -> None:
    """When a parameter that only the optimizer knows has a gradient of NaN, and the model has no
    gradients in this step, then the norm is not finite."""
    step = Beside()
    step.scale.grad = torch.full((1,), math.nan)
    numbers = step.watch.take()
    assert numbers.norm is not None
    assert math.isnan(numbers.norm)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("handed", [(), *HANDED])
def test_finite_gradients_of_a_second_model_change_no_bit_of_the_norm(
    handed: tuple[str, ...], *, clips: bool
) -> None:
    """When the gradients of a second model are finite, however large, then the norm has the same bits
    as without the second model."""
    alone, step = Step(), Beside(*handed)
    backward(alone.loss())
    step.train(1e12)
    for each in (alone, step):
        if clips:
            clip_grad_norm_(each.model.parameters(), 1.0)
    if clips:
        clip_grad_norm_(step.critic.parameters(), 1.0)
    assert step.watch.take().norm == alone.watch.take().norm
