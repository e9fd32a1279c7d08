"""
The digest of what one rank contributes to the gradients of a step, with real backward passes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tft_pytorch.contributions import Contributions
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """
    A process group of this process alone.
    """
    where = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def _watched(model: nn.Module) -> Contributions:
    contributions = Contributions()
    contributions.watch(model, model.parameters())
    assert contributions.digest() is None  # from now on gradients are watched
    return contributions


def _backward(model: nn.Module, number: float = 1.0) -> None:
    model.zero_grad()
    model(torch.full((2, 4), number)).pow(2).sum().backward()


def test_equal_gradients_have_equal_digests() -> None:
    """
    When two ranks compute the same gradients, then their digests are equal. Other gradients have
    another digest.
    """
    model = _model()
    contributions = _watched(model)
    digests = []
    for number in (1.0, 1.0, 2.0):
        with torch.no_grad():
            next(model.parameters()).mul_(number)
        _backward(model)
        digests.append(contributions.digest())
    assert digests[0] == digests[1] is not None
    assert digests[2] != digests[0]


def test_gradient_that_changes_after_backward_keeps_its_digest() -> None:
    """
    When the reduction writes into the gradients, then the digest is that of the gradients before.
    """
    model = _model()
    contributions = _watched(model)
    _backward(model)
    before = contributions.digest()
    _backward(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert contributions.digest() == before


def test_each_backward_of_a_step_counts() -> None:
    """
    When a step accumulates gradients, then the digest depends on each backward, and on their order.
    """
    model = _model()
    contributions = _watched(model)

    def step(*scales: float) -> int | None:
        for scale in scales:
            (model(torch.ones(2, 4)).sum() * scale).backward()
        return contributions.digest()

    assert len({step(1.0), step(1.0, 1.0), step(1.0, 2.0), step(2.0, 1.0)}) == 4


def test_step_that_is_given_up_leaves_no_digest() -> None:
    """
    When a step is given up after its backward, then its gradients are in no digest.
    """
    model = _model()
    contributions = _watched(model)
    _backward(model)
    expected = contributions.digest()
    _backward(model, 3.0)
    contributions.forget()
    assert contributions.digest() is None
    _backward(model)
    assert contributions.digest() == expected


def test_sparse_gradient_has_a_digest() -> None:
    """
    When the gradient of the watched parameter is sparse, then it is digested too.
    """
    embedding = nn.Embedding(6, 2, sparse=True)
    contributions = _watched(embedding)
    digests = []
    for row in (1, 1, 2):
        embedding(torch.tensor([row])).sum().backward()
        digests.append(contributions.digest())
    assert digests[0] == digests[1] is not None
    assert digests[2] != digests[0]


def test_output_of_a_module_is_watched_where_no_parameter_can_be(
    group_of_one: None,
) -> None:
    """
    When all parameters are distributed (DTensor), then the gradient of a module's output is
    digested: other gradients have another digest, and an evaluation leaves none.
    """
    model = _model()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    contributions = _watched(model)
    digests = []
    for number in (1.0, 1.0, 2.0):
        _backward(model, number)
        with torch.no_grad():
            model(torch.ones(2, 4))
        digests.append(contributions.digest())
    assert digests[0] == digests[1] is not None
    assert digests[2] != digests[0]
    contributions.let_go()
    _backward(model)
    assert contributions.digest() is None


def test_gradient_with_a_graph_is_not_kept_alive() -> None:
    """
    When a script differentiates its gradients again, then no graph stays behind after the step.
    """
    model = _model()
    contributions = _watched(model)
    digests = []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 4)).pow(2).sum().backward(create_graph=True)
        digests.append(contributions.digest())
        model.zero_grad()
    assert digests[0] == digests[1] is not None
    assert contributions._copy is not None
    assert contributions._copy[0].grad_fn is None
