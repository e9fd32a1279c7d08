"""
The audit of a training loop with the state of the PyTorch adaptor: which habits of the loop the
audit reports, and which it does not report.
"""

import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import pluggy
import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.groups import Groups
from tft_pytorch.hooks import TorchHooks
from tft_pytorch.state_store import StateStore
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # torch.distributed imports it from here
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from tests.adaptors.ranks import Batches
from tft.errors import Interrupted, UsageError
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.spi.state import StateHooks
from tft.worker.audit import STEPS, Audit, Findings

Logs = list[MutableMapping[str, Any]]  # Any: as structlog has them


class Looks:
    """
    The adaptor hooks that the audit calls, answered from a `StateStore`.
    """

    def __init__(self, state: StateStore) -> None:
        self._state = state

    @hookimpl
    def tft_compare(self, shard: str) -> Mapping[str, str]:
        """
        Return the comparison of a shard, as the adaptor does.
        """
        return self._state.compare(shard)

    @hookimpl
    def tft_generators(self) -> Mapping[str, str]:
        """
        Return the random generators, as the adaptor does.
        """
        return self._state.generators()

    @hookimpl
    def tft_unkept(self) -> Mapping[str, str]:
        """
        Return what is not kept, as the adaptor does.
        """
        return self._state.unkept()


class Net(nn.Module):
    """
    A network with a norm layer, dropout, and a buffer that counts the forward passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, 4) to a tensor of the same shape.
        """
        if self.training:
            self.seen += 1.0
        return self.last(self.dropout(self.norm(self.first(x))))  # type: ignore[no-any-return]  # torch has no types here


class Loop:
    """
    A training loop in one process, with the calls of the audit that a session makes.
    """

    def __init__(
        self, *, strict: bool = False, rank: int = 0, tails: bool = True, **parts: Any
    ):  # Any: arguments of `adopt`
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01))
        self.average = AveragedModel(self.model.first)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = adopt(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "others": {"average": self.average},
                **parts,
            },
            None,
            attributes=True,
        )
        self.state.rebuild()
        hooks = StateHooks[StateStore]()
        hooks.adopted = self.state
        manager = pluggy.PluginManager("tft")
        manager.add_hookspecs(AdaptorSpecs)
        for plugin in (hooks, Looks(self.state), TorchHooks(hooks, Groups())):
            manager.register(plugin)
        self.step, self.in_tail, self.awake = 0, False, 0
        self.tails = tails
        self.audit = Audit(
            hook=manager.hook, findings=Findings(rank=rank, strict=strict), loop=Loop.run.__code__, failed=lambda error, raised: None,
            awake=self._wake, position=lambda: (self.step, self.in_tail),
        )  # fmt: skip
        self.audit.begin(["dense"])

    def _wake(self) -> None:
        self.awake += 1

    def run(self, train: Callable[[], None]) -> Logs:
        """
        Run the loop `train` and return the log lines of the audit.
        """
        with capture_logs() as logs:
            train()
        return [line for line in logs if line["event"] == "audit"]

    def learn(self) -> None:
        """
        Run one step: forward pass, backward pass, and update window.
        """
        self.model(torch.ones(3, 4)).square().sum().backward()
        with self.update():
            self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def update(self) -> Iterator[None]:
        """
        Open and close the update window around the `with` block, as a session does.
        """
        self.state.capture()
        if not self.audit.over:
            self.audit.window_opens(self.step + 1, tails=self.tails)
        yield
        self.step += 1
        self.state.capture(closing=True)
        self.in_tail = self.tails
        if not self.audit.over:
            self.audit.window_closed(self.step, tails=self.tails)
        if not self.tails:
            self.end_step()

    def end_step(self, *, leaves: bool = False) -> None:
        """
        End the tail of the step. `leaves` says that the rank leaves its loop at this point.
        """
        self.audit.step_ends(self.step, leaves=leaves)
        self.state.end_step()
        self.in_tail = False


@contextmanager
def group() -> Iterator[None]:
    """
    Form a process group of this process alone for the `with` block.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def said(logs: Logs) -> list[tuple[str, str]]:
    """
    Return the finding and the explanation of each log line.
    """
    return [(line["finding"], line["why"]) for line in logs]


# ---------------------------------------------------------------- random numbers drawn after the update of a step


def test_tail_that_draws_random_numbers_is_reported_once() -> None:
    """When the tail of a step draws random numbers, then the audit reports this once, with the
    generators and the first and last line of the tail. The reports of later incidents say that they
    are inexact."""
    loop = Loop(rng=("torch", "numpy"))

    def train() -> None:
        for _ in range(3):
            loop.learn()
            torch.rand(1)
            numpy.random.rand()
            loop.end_step()

    ((finding, why),) = said(loop.run(train))
    code = train.__code__.co_firstlineno
    assert finding == "draws"
    assert "the tail of step 1 draws random numbers (generators torch, numpy)" in why
    assert f"({__file__}:{code + 2}) and the end of the step ({__file__}:{code + 5})" in why
    (sentence,) = loop.audit.inexact
    assert "generators torch, numpy" in sentence


def test_data_loader_without_a_generator_in_the_tail_is_reported() -> None:
    """When a tail iterates over a data loader that has no generator of its own, then the audit
    reports it. If the loader has its own generator, the audit reports nothing."""
    for generator, found in ((None, ["draws"]), (torch.Generator(), [])):
        loop = Loop()
        loader = DataLoader(
            TensorDataset(torch.ones(4, 4)), shuffle=generator is not None, generator=generator
        )

        def train(loop: Loop = loop, loader: DataLoader[tuple[Tensor, ...]] = loader) -> None:
            loop.learn()
            for _ in loader:
                pass
            loop.end_step()

        assert [finding for finding, _ in said(loop.run(train))] == found


def test_only_rank_0_reports_a_finding_of_all_ranks() -> None:
    """When rank 1 finds a habit that all ranks have, then rank 1 reports nothing, because rank 0
    does. It still records that later incidents are inexact."""
    loop = Loop(rank=1)

    def train() -> None:
        loop.learn()
        torch.rand(1)
        loop.end_step()

    assert loop.run(train) == []
    assert len(loop.audit.inexact) == 1


# ---------------------------------------------------------------- tails with collectives


def test_state_changed_after_a_collective_in_the_tail_is_reported() -> None:
    """When the tail changes the learning rate after a collective, then the audit reports the change
    with the line of the collective. Changes before the collective are not reported. Afterwards
    torch's methods are restored."""
    before = dict(vars(dist.ProcessGroup))
    loop = Loop()

    def train() -> None:
        loop.learn()
        loop.average.update_parameters(loop.model.first)
        dist.all_reduce(torch.ones(1))
        loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        loop.end_step()

    with group():
        found = said(loop.run(train))
    line = f"{__file__}:{train.__code__.co_firstlineno + 3}"
    assert [finding for finding, _ in found] == ["collective"]
    assert (
        f"changes the settings of the parameter groups after its collective ({line})" in found[0][1]
    )
    assert dict(vars(dist.ProcessGroup)) == before


def test_tail_without_changes_after_its_collectives_is_not_reported() -> None:
    """When a tail changes state only before its collectives, then the audit reports nothing."""
    loop = Loop()

    def train() -> None:
        for _ in range(3):
            loop.learn()
            loop.scheduler.step()
            dist.all_reduce(torch.ones(1))
            dist.barrier()
            loop.end_step()

    with group():
        assert loop.run(train) == []


# ---------------------------------------------------------------- faults that tails keep


def failing(loop: Loop) -> ConnectionError:
    """
    Report to the audit that a collective of this loop failed, and return the error.
    """
    error = ConnectionError("gone")
    loop.audit.collective_failed(loop.step, error)
    return error


def test_collective_fault_that_leaves_the_loop_is_not_reported() -> None:
    """When an exception that was caused by a failed collective leaves the loop, then the audit
    reports nothing."""
    loop = Loop()

    def train() -> None:
        loop.learn()
        error = failing(loop)
        other = RuntimeError("evaluation")
        other.__cause__ = error
        assert loop.audit.left(other) == ""

    assert loop.run(train) == []


def test_collective_fault_caught_in_the_tail_is_reported_by_each_rank() -> None:
    """When the loop catches the exception of a failed collective and continues, even after the
    audited steps, then each such rank reports it. The reports of later incidents say that they are
    inexact."""
    loop = Loop(rank=1)

    def train() -> None:
        for _ in range(STEPS + 2):
            loop.learn()
            loop.end_step()
        assert loop.audit.over
        loop.learn()
        failing(loop)
        assert loop.awake == 1
        loop.end_step()

    ((finding, why),) = said(loop.run(train))
    assert finding == "swallows"
    assert "(ConnectionError: gone)" in why
    assert loop.audit.inexact[0].startswith(f"the tail of step {STEPS + 3} has hidden a fault")


def test_rank_that_caught_a_fault_leaves_the_loop_before_the_step_ends() -> None:
    """When the tail of a rank has caught the exception of a failed collective, and the rank must
    leave the loop, then it leaves before the step ends. The line in the report is that of the
    failed collective."""
    loop = Loop()

    def train() -> None:
        loop.learn()
        failing(loop)
        with pytest.raises(Interrupted) as caught:
            loop.end_step(leaves=True)
        assert loop.in_tail
        line = train.__code__.co_firstlineno + 2
        assert loop.audit.left(caught.value) == f"{__file__}:{line}"

    assert [finding for finding, _ in said(loop.run(train))] == ["swallows"]


# ---------------------------------------------------------------- changes after the end of a step


def test_average_updated_at_the_head_of_the_loop_is_reported() -> None:
    """When a moving average is updated at the head of the loop, then the audit reports it. Changes
    of learning rate, scheduler, settings and modes at the head are not reported."""
    loop = Loop()

    def train() -> None:
        for step in range(4):
            loop.model.train()
            loop.average.update_parameters(loop.model.first)
            loop.optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))
            loop.optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            loop.scheduler.last_epoch = step
            loop.learn()
            loop.model.eval()
            loop.end_step()

    ((finding, why),) = said(loop.run(train))
    assert finding == "head"
    assert why.startswith("'average' changed between the end of step 1")
    assert "session.end_step" not in why


def test_loop_without_end_step_gets_the_advice_to_call_it() -> None:
    """When a loop that does not call `session.end_step` changes state after its update window, then
    the report advises to call `session.end_step`."""
    loop = Loop(tails=False)

    def train() -> None:
        for _ in range(3):
            loop.learn()
            loop.average.update_parameters(loop.model.first)

    ((finding, why),) = said(loop.run(train))
    assert finding == "head"
    assert "call session.end_step() at the end of the iteration" in why


def test_first_step_with_end_step_is_not_reported() -> None:
    """When a loop calls `session.end_step` for the first time after its first update window, then
    the changes before that call belong to the tail and are not reported."""
    loop = Loop(tails=False)

    def train() -> None:
        for _ in range(3):
            loop.learn()
            loop.average.update_parameters(loop.model.first)
            loop.tails = True
            loop.end_step()

    assert loop.run(train) == []


def test_parameters_changed_in_the_backward_pass_are_reported() -> None:
    """When a hook changes parameters in the backward pass, then the audit reports that parameters
    or buffers changed outside the update window."""
    loop = Loop()

    def decay(parameter: Tensor) -> None:
        parameter.data.mul_(0.99)

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(decay)  # type: ignore[no-untyped-call]  # torch has no types here

    def train() -> None:
        for _ in range(3):
            loop.learn()
            loop.end_step()

    ((finding, why),) = said(loop.run(train))
    assert finding == "outside"
    assert why.startswith("parameters or buffers of the model changed outside any update window")
    (reason,) = loop.audit.inexact
    assert why.startswith(reason.removesuffix(": an incident there may repeat or undo the change"))


# ---------------------------------------------------------------- strict mode, and the end of the audit


def test_strict_audit_raises_in_any_step() -> None:
    """When the audit is strict, then a habit that it finds raises `UsageError` with the text of the
    finding, even after the first steps."""
    loop = Loop(strict=True)

    def train() -> None:
        for step in range(STEPS + 5):
            loop.learn()
            if step == STEPS + 3:
                torch.rand(1)
            loop.end_step()

    with pytest.raises(UsageError, match=r"draws random numbers .* `--audit strict` does not let"):
        loop.run(train)
    assert loop.step == STEPS + 4


@pytest.mark.soak
def test_habit_that_begins_after_the_audited_steps_is_not_reported() -> None:
    """When a habit begins after the audited steps, then the audit reports nothing."""
    loop = Loop()

    def train() -> None:
        for step in range(STEPS + 5):
            loop.learn()
            if step > STEPS:
                torch.rand(1)
            loop.end_step()

    assert loop.run(train) == []
    assert loop.audit.over


def test_state_changed_between_two_entries_of_the_loop_is_not_reported() -> None:
    """When the loop is left, the state is changed, and the loop is entered again, then the audit
    reports nothing."""
    loop = Loop()

    def train() -> None:
        loop.learn()
        loop.end_step()
        assert loop.audit.left(Interrupted()) == ""
        with torch.no_grad():
            loop.model.last.weight.zero_()
        loop.learn()
        loop.end_step()

    assert loop.run(train) == []


def test_state_that_is_not_kept_is_reported_once() -> None:
    """When the adaptor finds state that is not kept, then it is logged once, and no later recovery of
    this rank counts as exact. A strict audit raises."""
    loop = Loop()
    with capture_logs() as logs:
        for _ in range(2):
            loop.audit.unkept("A.x", "the attribute x changes")
    assert [each["finding"] for each in logs] == ["unkept"]
    assert loop.audit.inexact == ["the attribute x changes"]
    with pytest.raises(UsageError, match="the attribute x changes"):
        Loop(strict=True).audit.unkept("A.x", "the attribute x changes")


@pytest.mark.parametrize("tails", [True, False])
def test_tensor_of_a_module_that_is_no_buffer_is_reported(tails: bool) -> None:
    """When a step changes a tensor of a module that is no buffer, then the audit reports this once,
    with the remedy. A changed number is kept, so it is not reported."""
    loop = Loop(tails=tails)
    mean = torch.zeros(4)
    vars(loop.model)["mean"] = mean

    def train() -> None:
        for _ in range(3):
            loop.learn()
            loop.model.dropout.p *= 0.5
            mean.add_(1.0)
            if tails:
                loop.end_step()

    logs = loop.run(train)
    assert [finding for finding, _ in said(logs)] == ["unkept"]
    assert "Net.mean" in logs[0]["why"]
    assert loop.audit.inexact == [logs[0]["why"]]


@pytest.mark.parametrize(
    ("rng", "rest"), [((), ["python", "numpy"]), (("torch", "python"), ["numpy"])]
)
def test_draws_from_a_generator_that_is_not_kept_are_reported(
    rng: tuple[str, ...], rest: list[str]
) -> None:
    """When a step draws from a global generator of Python or numpy that was not handed over, then the
    audit reports each once, with the line that hands it over."""
    loop = Loop(rng=rng)

    def train() -> None:
        for _ in range(4):
            random.random()
            numpy.random.rand()
            loop.learn()
            loop.end_step()

    found = said(loop.run(train))
    assert [finding for finding, _ in found] == ["unkept"] * len(rest)
    for (_, why), name in zip(found, rest, strict=True):
        assert f'"{name}"))' in why
    assert loop.audit.inexact == [why for _, why in found]


@pytest.mark.parametrize(("tail", "head"), [(1, 1), (1, 0), (0, 1)])
def test_data_taken_in_the_tail_and_at_the_next_head_is_reported(tail: int, head: int) -> None:
    """When a loop takes a batch in the tail of a step, as for validation, and another one at the head
    of the next step, then the audit reports this once. A loop that takes batches in only one of the
    two places is not reported."""
    data = Batches(0)
    loop = Loop(data=data)

    def train() -> None:
        data.next()
        for step in range(4):
            for _ in range(head):
                data.next()
            loop.learn()
            if step % 2 == 0 or not head:
                for _ in range(tail):
                    data.next()
            loop.end_step()

    logs = loop.run(train)
    assert [finding for finding, _ in said(logs)] == ["takes"] * (tail * head)
    for line in logs:
        assert "the tail of step 1 " in line["why"]
        assert "the update window of step 2:" in line["why"]
    assert len(loop.audit.inexact) == tail * head


def test_data_taken_in_the_tail_is_reported_when_an_incident_comes_before_the_window() -> None:
    """When a loop has taken a batch in the tail and another one at the next head, and an incident
    interrupts it there, then the report of this incident has it."""
    data = Batches(0)
    loop = Loop(data=data, strict=True)

    def train() -> None:
        loop.learn()
        data.next()
        loop.end_step()
        data.next()
        loop.audit.left(None)

    assert [finding for finding, _ in said(loop.run(train))] == ["takes"]
    assert len(loop.audit.inexact) == 1


@pytest.mark.parametrize("audited", [True, False])
@pytest.mark.parametrize("change", ["scheduler", "rate", "average", ""])
def test_code_that_runs_again_before_the_first_step_is_reported(audited: bool, change: str) -> None:
    """When the function is called again after an incident and changes the scheduler, the learning
    rate or an average before its first step, then the audit reports this, also if it has ended. With
    what costs little to read, a large average is not seen."""
    loop = Loop()

    def train() -> None:
        loop.audit.entered(audited=audited)
        if change == "scheduler" and loop.step:
            loop.scheduler.step()
        if change == "rate":
            loop.optimizer.param_groups[0]["lr"].mul_(0.1)
        if change == "average":
            with torch.no_grad():
                loop.average.get_parameter("module.weight").mul_(0.5)
        loop.model.train()
        loop.audit.first_step(loop.step + 1)
        loop.learn()
        loop.end_step()
        loop.audit.left(None)

    assert not loop.run(train), "the function is called for the first time"
    found = said(loop.run(train))
    seen = change and (audited or change != "average")
    assert [finding for finding, _ in found] == ["again"] * bool(seen)
    assert len(loop.audit.inexact) == len(found)
    assert all("before its first step, which is step 2 " in why for _, why in found)
    assert len(said(loop.run(train))) == len(found), "each incident is reported"


def test_scheduler_stepped_between_two_loops_is_reported() -> None:
    """When a loop over epochs makes a step of the scheduler behind its loop over the steps, then the
    audit reports this once. In the tail of a step it is not reported."""

    def train(loop: Loop, *, between: bool) -> None:
        loop.audit.entered(audited=True)
        for _ in range(3):
            loop.audit.loop_begins()
            for step in range(2):
                loop.audit.step_begins()
                loop.optimizer.param_groups[0]["weight_decay"] = 0.1 * loop.step
                loop.learn()
                if step == 1 and not between:
                    loop.scheduler.step()
                loop.end_step()
            if between:
                loop.model.eval()
                loop.scheduler.step()

    loop = Loop()
    ((finding, why),) = said(loop.run(partial(train, loop, between=True)))
    assert (finding, why.startswith("the scheduler")) == ("between", True)
    assert "after step 2 and before step 3" in why
    assert len(loop.audit.inexact) == 1
    loop = Loop()
    assert not loop.run(partial(train, loop, between=False))


def test_draws_outside_steps_are_not_reported() -> None:
    """When a function that is called after a step, or the script before its first step, draws from a
    generator that is not kept, then the audit does not report it."""
    loop = Loop()

    def train() -> None:
        random.random()
        for _ in range(4):
            loop.learn()
            loop.end_step()
            done = loop.state.set_aside()
            random.random()
            done()

    assert not loop.run(train)
