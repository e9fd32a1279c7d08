"""
Which DDP configurations the adaptor can rebuild with the same gradient buckets, and which it
refuses.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from tft_pytorch import adaptor
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed imports it from here
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from tests.adaptors.conftest import NewJob
from tests.adaptors.ranks import WIDTH, Actor, Failure


@pytest.mark.parametrize(
    ("wrapper", "complaint"),
    [({"static_graph": True}, "static_graph"), ({"mixed_precision": "bf16"}, "mixed_precision")],
)
def test_ddp_with_unsupported_options_is_refused(
    job: NewJob, wrapper: dict[str, Any], complaint: str
) -> None:
    """When `wrap` builds a DDP with an option that tft cannot rebuild after an incident, then the
    first rebuild raises `UsageError` before any step is trained."""
    one = job(1).ranks[0]
    one.tell("call", rebuild_as, wrapper)
    answer = one.hear()
    assert isinstance(answer, Failure)
    assert answer.words.startswith("UsageError: tft cannot rebuild")
    assert complaint in answer.words


def test_ddp_rebuilt_with_other_buckets_is_refused(job: NewJob) -> None:
    """When `wrap` builds a DDP with other gradient buckets after an incident, then the rebuild
    fails, because the job would no longer be bit for bit the same."""
    one = job(1).ranks[0]
    one.ask("train", 2)
    one.tell("call", rebuild_as, {"bucket_cap_mb": 0.5})
    answer = one.hear()
    assert isinstance(answer, Failure)
    assert "must build the same DDP each time" in answer.words


def test_rebuild_calls_no_parameter_hook_of_the_user(job: NewJob) -> None:
    """When parameters have hooks, then the rebuild of a DDP calls none of them and leaves no
    gradient."""
    one = job(1).ranks[0]
    one.ask("train", 3)
    assert one.ask("call", rebuild_watched) == ([], True)


@pytest.mark.parametrize("unused", [False, True])
def test_rank_reports_its_contribution_before_the_last_all_reduce(
    job: NewJob, *, unused: bool
) -> None:
    """When a step is trained, then the adaptor reports the contribution exactly once. The report
    comes after the random numbers are drawn and before the all-reduce of the last bucket."""
    alone = job(1)
    alone.all("clear")
    alone.all("call", adopt_listening, unused)
    alone.form()
    for _ in range(2):
        told = alone.ranks[0].ask("call", train_listening)
        assert [what for what, _ in told] == ["contributing", "last sum", "end"] * 2
        assert len({drawn for _, drawn in told[:3]}) == 1
        assert len({drawn for _, drawn in told}) == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_bucket_layout_is_equal_after_a_rebuild(job: NewJob, *, sparse: bool) -> None:
    """When a model has several wrappers, mixed types and possibly sparse gradients, then each
    rebuilt DDP has the same buckets as before."""
    ranks = job(2)
    ranks.all("clear")
    ranks.all("call", adopt_mixed, sparse)
    ranks.form()
    before = ranks.all("call", train_mixed)
    after = ranks.all("call", rebuild_mixed)
    assert before[0] == before[1] == after[0] == after[1]
    assert len(before[0]) == 2  # type: ignore[arg-type]  # both are lists


# ---------------------------------------------------------------- functions for the rank's process


def rebuild_as(actor: Actor, options: dict[str, Any]) -> None:
    """
    Rebuild the model with a DDP that has these options.
    """
    if options.get("mixed_precision"):
        options["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16)
    actor.recipe.wrapper.update(options)
    actor.build()


def rebuild_watched(actor: Actor) -> tuple[list[str], bool]:
    """
    Rebuild the model. Return the hooks that were called, and whether no parameter has a gradient.
    """
    called: list[str] = []
    for parameter in actor.net.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _: called.append("hook"))
    actor.build()
    return called, all(parameter.grad is None for parameter in actor.net.parameters())


def adopt_listening(actor: Actor, unused: bool) -> None:
    """
    Adopt a model whose DDP notes each all-reduce of its last bucket.
    """

    def note(what: str) -> None:
        actor.kept.append((what, xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().data)))

    def summing(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            note("last sum")
        assert dist.group.WORLD is not None
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def wrap() -> DDP:
        ddp = DDP(actor.net, find_unused_parameters=unused)
        ddp.register_comm_hook(None, summing)
        return ddp

    adaptor.tft_watch(lambda: note("contributing"), early=False)
    adaptor.tft_adopt({"model": actor.net, "optimizer": actor.optimizer}, wrap)


def train_listening(actor: Actor) -> list[tuple[str, str]]:
    """
    Rebuild, run two steps, and return the notes, each with a digest of the random state at that
    time.
    """
    actor.build()
    actor.kept.clear()
    for _ in range(2):
        actor.half_step()
        adaptor.tft_capture(closing=False)
        actor.optimizer.step()
        adaptor.tft_capture(closing=True)
        actor.kept.append(("end", xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().data)))
    return list(actor.kept)


class Mixed(nn.Module):
    """
    A model with large and small parameters of two types and an embedding, possibly with a sparse
    gradient.

    The test makes two models of this class and wraps each in its own DDP.
    """

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(100, WIDTH, sparse=sparse)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        """
        Map (batch) to (batch, WIDTH).
        """
        x = self.words(words)
        for layer in (self.inner[3], self.inner[0], self.inner[4], self.inner[2], self.inner[1]):
            x = layer(x)
        return self.wide(x.double())  # type: ignore[no-any-return]  # torch has no types here


def adopt_mixed(actor: Actor, sparse: bool) -> None:
    """
    Adopt two `Mixed` models, each in its own DDP wrapper, with one optimizer for both.
    """
    parts = nn.ModuleList(Mixed(sparse=sparse) for _ in range(2))
    actor.optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    adaptor.tft_adopt(
        {"model": parts, "optimizer": actor.optimizer},
        lambda: [DDP(part, bucket_cap_mb=1) for part in parts],
    )


def train_mixed(actor: Actor) -> list[list[list[int]]]:
    """
    Rebuild, run three steps, and return the buckets of each DDP wrapper.
    """
    wrapped = adaptor.tft_rebuild()
    for _ in range(3):
        for ddp in wrapped:
            ddp(torch.tensor([1, 5, 1])).square().mean().backward()
        actor.optimizer.step()
        adaptor.tft_capture(closing=True)
        actor.optimizer.zero_grad()
    return [buckets_of(ddp) for ddp in wrapped]


def rebuild_mixed(_: Actor) -> list[list[list[int]]]:
    """
    Rebuild, run one backward pass, and return the buckets of each DDP wrapper in that pass.
    """
    wrapped = adaptor.tft_rebuild()
    for ddp in wrapped:  # sparse buckets exist only during a backward pass
        ddp(torch.tensor([1, 5, 1])).square().mean().backward()
    return [buckets_of(ddp) for ddp in wrapped]


def buckets_of(ddp: Any) -> list[list[int]]:  # Any: the reducer has no types
    """
    Return the buckets that the reducer of this DDP uses, each as the positions of its parameters.
    """
    places = {id(parameter): place for place, parameter in enumerate(ddp.module.parameters())}
    return sorted(  # the order of the buckets does not change any sum
        [places[id(parameter)] for parameter in bucket.parameters()]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    )
