"""
The check after an optimizer's first step: it finds state that cannot be kept before the first
incident needs this state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn

from tests.adaptors.test_replicas import OPTIMIZERS
from tft.errors import UsageError


@dataclass
class Factors:
    """
    An object with a tensor, like the factors of a preconditioner.
    """

    left: Tensor


class Shampoo(torch.optim.SGD):
    """
    An optimizer with objects instead of tensors in its state, like Distributed Shampoo.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Store the factors of each parameter, and apply the step of SGD.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = Factors(torch.ones(2))
        return super().step(closure)


class Low(torch.Tensor):
    """
    A subclass of tensor, as low-precision libraries define one.
    """


class LowState(torch.optim.SGD):
    """
    An optimizer whose state holds tensors of the subclass `Low`.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Store a `Low` tensor for each parameter, and apply the step of SGD.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["low"] = torch.ones(2).as_subclass(Low)
        return super().step(closure)


class Momentum(torch.optim.SGD):
    """
    An optimizer that keeps the velocity of each parameter in an attribute instead of its state.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.velocity: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Update the velocities and apply them to the parameters.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                known = self.velocity.setdefault(parameter, torch.zeros_like(parameter))
                known.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(known, alpha=-group["lr"])


class CountingSteps(torch.optim.SGD):
    """
    An optimizer that counts its steps in an attribute.

    Its other attributes do not belong to the training state.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.steps = 0
        self.begun = False
        self.every = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Count the step, and apply the step of SGD.
        """
        self.steps += 1
        self.begun = True
        return super().step(closure)


class Drawing(torch.optim.SGD):
    """
    An optimizer that draws random numbers from its own generator, as for stochastic rounding.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.generator = torch.Generator()

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Draw a number, and apply the step of SGD.
        """
        torch.rand(1, generator=self.generator)
        return super().step(closure)


class Caching(torch.optim.SGD):
    """
    An optimizer that makes a table in its first step and never changes the table.
    """

    table: Tensor | None = None

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Make the table if there is none, and apply the step of SGD.
        """
        if self.table is None:
            self.table = torch.arange(100.0)
            self.count = 100
        return super().step(closure)


class Flat(torch.optim.SGD):
    """
    An optimizer whose velocities are views of one flat tensor. It makes them in its first step, or
    when it is made.
    """

    def __init__(self, params: Any, *, early: bool = False, **settings: Any) -> None:
        super().__init__(params, **settings)
        if early:
            self.make()

    def make(self) -> None:
        """
        Make the flat tensor and the velocities.
        """
        [group] = self.param_groups
        group["flat"] = torch.zeros(sum(p.numel() for p in group["params"]))
        parts = group["flat"].split([p.numel() for p in group["params"]])
        for parameter, part in zip(group["params"], parts, strict=True):
            self.state[parameter]["velocity"] = part.view_as(parameter)

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Change all velocities at once, and apply them to the parameters.
        """
        if not self.state:
            self.make()
        [group] = self.param_groups
        group["flat"].mul_(0.9)
        for parameter in group["params"]:
            velocity = self.state[parameter]["velocity"]
            parameter.data.sub_(velocity.add_(parameter.grad))


class Views(torch.optim.SGD):
    """
    An optimizer whose state has tensors that have a storage or memory in common, but no element that
    two of them can change.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Make the views, and apply the step of SGD.
        """
        if not self.state:
            [group] = self.param_groups
            count = len(group["params"])
            rows, columns = torch.zeros(count, 3), torch.zeros(3, count)
            shared = torch.zeros(2)
            for at, parameter in enumerate(group["params"]):
                self.state[parameter].update(row=rows[at], column=columns[:, at], shared=shared)
        return super().step(closure)


class Expanded(torch.optim.SGD):
    """
    An optimizer whose state has two tensors of the same memory that no step changes, and two of a
    memory that each step makes anew.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Make the views, and apply the step of SGD.
        """
        [group] = self.param_groups
        first = self.state[group["params"][0]]
        if "one" not in first:
            first["one"] = torch.zeros(1)
            first["many"] = first["one"].expand(4)
        group["flat"] = torch.cat([p.grad.reshape(-1) for p in group["params"]])
        first["part"] = group["flat"][:3]
        return super().step(closure)


class Writing(torch.optim.SGD):
    """
    An optimizer that keeps the memory of its parameters as masters.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Note the memory of each parameter, and change it.
        """
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.data)
            master.sub_(parameter.grad)


def adopted(
    make: Callable[..., torch.optim.Optimizer], **parts: Any
) -> tuple[StateStore, Callable[[], None]]:
    """
    Return the adopted state of an optimizer, and a function that trains it for one step.
    """
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters(), lr=0.1)
    parts = {name: part(optimizer) for name, part in parts.items()}
    state = adopt({"model": model, "optimizer": optimizer, **parts}, None)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        state.opening()
        optimizer.step()
        if "scheduler" in parts:
            parts["scheduler"].step()
        state.capture(closing=True)
        optimizer.zero_grad()

    return state, step


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Shampoo, r"after a step of Shampoo, .* optim\.state\.weight\.factors holds a .*Factors"),
        (LowState, r"after a step of LowState, .* optim\.state\.weight\.low is a Low of layout"),
        (
            Momentum,
            r"Momentum keeps state in its attributes, .* get: velocity\. .* others=\{'velocity'",
        ),
        (
            CountingSteps,
            r"CountingSteps keeps state in its attributes, .* get: steps\. Keep this state",
        ),
        (Drawing, r"Drawing keeps state in its attributes, .* get: generator\."),
    ],
)
def test_optimizer_with_hidden_state_is_refused_after_its_first_step(
    make: Callable[..., torch.optim.Optimizer], why: str
) -> None:
    """When an optimizer keeps objects, unsupported tensors or attributes that a replacement would
    lack, then the close of the first update window refuses it. The message says what to do."""
    _, step = adopted(make)
    with pytest.raises(UsageError, match=why):
        step()


def test_views_that_are_written_through_are_refused_after_the_second_step() -> None:
    """When an optimizer makes views of one tensor in its first step, then an incident before the
    second step has a reservation. After the second step the next window is refused before it opens,
    so that a last checkpoint of the second step can be written."""
    state, step = adopted(Flat)
    step()
    lost = state.rollback(state.capture())
    assert lost is not None
    assert "flat and optim.state.bias.velocity share memory" in lost
    why = r"flat and optim\.state\.bias\.velocity share memory, .* two separate tensors: "
    step()
    for _ in range(2):
        with pytest.raises(UsageError, match=why):
            step()


def test_masters_in_the_memory_of_parameters_are_a_reservation() -> None:
    """When state of an optimizer is the whole memory of a parameter, then it is not known whether
    the optimizer needs that. So training continues, and each incident has a reservation."""
    state, step = adopted(Writing)
    assert state.rollback(state.capture()) is None
    for _ in range(9):
        step()
    lost = state.rollback(state.capture())
    assert lost is not None
    assert "model.bias and optim.state.bias.master share memory (further pairs: 1)" in lost


def test_views_that_no_step_needs_are_no_reservation() -> None:
    """When common memory of state has not changed for a step, or was made anew in the step, then an
    incident has no reservation."""
    state, step = adopted(Expanded)
    for _ in range(4):
        step()
    assert state.rollback(state.capture()) is None


class Kept:
    """
    A part of the training state that saves the step count of a `CountingSteps` optimizer.
    """

    def __init__(self, optimizer: CountingSteps) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, int]:
        """
        Return the step count.
        """
        return {"steps": self._optimizer.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the step count to the one in `state`.
        """
        self._optimizer.steps = state["steps"]


def test_optimizer_attribute_that_is_handed_over_is_accepted() -> None:
    """When `others` contains the state that an optimizer keeps in an attribute, under the same
    name, then training continues. The digest of that part changes with the steps."""
    state, step = adopted(CountingSteps, others=lambda optimizer: {"steps": Kept(optimizer)})
    before = state.digests()["steps"]
    for _ in range(4):
        step()
    assert state.digests()["steps"] != before


class FlatFirst(Flat):
    """
    An optimizer whose flat tensor is made with the optimizer.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, early=True, **settings)


@pytest.mark.parametrize(
    "make", [*OPTIMIZERS, Caching, FlatFirst, Views, Expanded], ids=lambda each: each.__name__
)
def test_optimizers_that_keep_all_in_their_state_are_accepted(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    """When an optimizer keeps everything in its state, as torch's own optimizers do, or creates
    something only once, or has views that another process has too, then training continues for 9
    steps."""
    _, step = adopted(
        make, scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )
    for _ in range(9):
        step()
