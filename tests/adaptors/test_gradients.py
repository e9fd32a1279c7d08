"""
Gradients after an incident: they are zeros if the script sets gradients to zero, and None if the
script drops them.
"""

import timeit

import pytest
import torch
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.gradients import Gradients
from tft_pytorch.state_store import StateStore
from torch import nn

from tests.adaptors.test_state import move
from tft.errors import MalformedMessage


class Trainee:
    """
    A rank that trains two layers and a sparse embedding, with the calls that a session makes.
    """

    def __init__(self, *, drops: bool, head: bool, tails: bool = True) -> None:
        self.model = nn.ModuleList(
            [
                nn.Linear(4, 4, bias=False),
                nn.Linear(4, 4, bias=False),
                nn.Embedding(4, 4, sparse=True),
            ]
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: StateStore = adopt({"model": self.model, "optimizer": self.optimizer}, None)
        self.drops = drops
        self.head = head
        self.tails = tails
        self.dropped: list[nn.Parameter] = []
        self.local_state = self.state.capture()

    def step(self, *used: int) -> None:
        """
        Run one step whose forward pass uses the layers with these indices.
        """
        self.begin(*used)
        self.optimizer.step()
        self.local_state = self.state.capture(closing=True)
        if not self.tails:
            self.local_state = self.state.end_step(tail=False) or self.local_state
        if not self.head:
            self.optimizer.zero_grad(set_to_none=self.drops)
        for parameter in self.dropped:
            parameter.grad = None
        if self.tails:
            self.local_state = self.state.end_step(tail=True) or self.local_state

    def begin(self, *used: int) -> None:
        """
        Run a step up to the opening of its update window. `used` are the indices of the layers.
        """
        self.clean()
        for index in used:
            x = torch.tensor([1, 2]) if index == 2 else torch.ones(2, 4)
            self.model[index](x).sum().backward()
        self.state.capture()

    def clean(self) -> None:
        """
        Set the gradients to zero or drop them, if this loop does so at its head.
        """
        if self.head:
            self.optimizer.zero_grad(set_to_none=self.drops)

    def left(self) -> list[str]:
        """
        Return a description of each gradient as the first backward pass of the next step would find
        it.
        """
        self.clean()
        return [
            "none" if p.grad is None else f"{p.grad.layout} {float(p.grad.to_dense().abs().sum())}"
            for p in self.model.parameters()
        ]


ZERO, NONE, SPARSE = "torch.strided 0.0", "none", "torch.sparse_coo 0.0"


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(
    ("drops", "steps", "left"),
    [
        (False, [(0,), (0, 1, 2)], [ZERO, ZERO, SPARSE]),
        (False, [(0,), (0,), (0,)], [ZERO, NONE, NONE]),
        (False, [(0,), (0, 1), (2,)], [ZERO, ZERO, SPARSE]),
        (False, [(0,), (0,), (0,), (0,), (0,), (0, 1)], [ZERO, ZERO, NONE]),
        (True, [(0,), (0, 1, 2)], [NONE, NONE, NONE]),
    ],
)
def test_gradients_after_a_rollback_are_those_of_the_step_start(
    head: bool, drops: bool, steps: list[tuple[int, ...]], left: list[str]
) -> None:
    """When a step is rolled back several times, then the gradients are each time as they were at
    the start of the step. A successor has the same gradients."""
    rank, other = Trainee(drops=drops, head=head), Trainee(drops=drops, head=head)
    for used in steps:
        rank.step(*used)
    for _ in range(2):
        assert rank.left() == left
        rank.begin(0, 1, 2)
        rank.state.rollback(rank.local_state)
    assert rank.left() == left
    move(rank.state, other.state)
    other.state.rollback(rank.local_state)
    assert other.left() == left


def test_dropped_gradient_of_one_parameter_stays_dropped() -> None:
    """When a script sets the gradients to zero and drops those of one layer, then after a rollback
    the parameters of that layer have no gradients."""
    rank = Trainee(drops=False, head=False)
    rank.dropped = list(rank.model[1].parameters())
    for _ in range(3):
        rank.step(0, 1)
    rank.begin(0, 1)
    rank.state.rollback(rank.local_state)
    assert rank.left() == [ZERO, NONE, NONE]


def test_gradients_are_dropped_when_the_loop_does_not_call_end_step() -> None:
    """When the loop does not call `end_step`, so that its handling of gradients is unknown, then a
    rollback drops the gradients."""
    rank = Trainee(drops=True, head=False, tails=False)
    for _ in range(3):
        rank.step(0, 1)
    rank.begin(0)
    rank.state.rollback(rank.local_state)
    assert rank.left() == [NONE, NONE, NONE]


def test_malformed_list_of_gradients_is_refused() -> None:
    """When a list of gradients cannot be read, then it is refused with `MalformedMessage`. A list
    of another model is ignored."""
    gradients = Gradients()
    gradients.watch(nn.Linear(2, 2).parameters())
    for odd in (3, b"\7\7"):
        with pytest.raises(MalformedMessage, match="gradients"):
            gradients.put_back(odd)
    gradients.put_back(b"\1")
    assert gradients.noted is None


def test_watching_dropped_gradients_takes_less_than_2_microseconds() -> None:
    """When a script drops its gradients, then watching the gradients of a model with 100 parameters
    takes less than 2 microseconds a step."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))
    gradients = Gradients()
    gradients.watch(model.parameters())
    assert min(timeit.repeat(gradients.ended, number=200, repeat=20)) / 200 < 2e-6


@pytest.mark.parametrize("handed", ["critic", "critics"])
def test_gradients_of_a_second_model_are_dropped(handed: str) -> None:
    """When a step is interrupted after the backward pass of a second model, then the repeated step
    begins without its gradients, whether the model or its optimizer is among `others`."""
    model, critic = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, critics = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    others = {"critic": critic, "critics": critics}
    given = {"model": model, "optimizer": optimizer, "others": {handed: others[handed]}}
    state = adopt(given, None)
    local_state = state.capture(closing=True)
    critic(torch.ones(2, 4)).sum().backward()
    state.rollback(local_state)
    assert [each.grad for each in critic.parameters()] == [None, None]
