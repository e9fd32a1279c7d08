"""The inputs that the adaptor for Megatron refuses before it changes any state, and the
messages."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import tft_megatron
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
from tft_megatron.method_hooks import Replaced
from tft_megatron.schedulers import check_scheduler
from tft_megatron.training import Training, refuse_exchanging_muon
from tft_megatron.versions import check_megatron

from tft.errors import UsageError


@dataclass
class Session:
    """
    A stand-in for `tft.Session` with the members that `begin` and an update window use.
    """

    adaptor: str = "megatron"
    rank: int = 0
    world: int = 4
    windows: list[str] = field(default_factory=list)

    @contextmanager
    def update(self) -> Iterator[None]:
        self.windows.append("open")
        yield
        self.windows.append("closed")


class Scheduler:
    """
    A stand-in for Megatron's scheduler that counts samples.
    """

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment


class Optimizer:
    """
    A chained optimizer without parts. With `infinite` set, it reports infinite gradients.
    """

    def __init__(self) -> None:
        self.chained_optimizers: list[Any] = []
        self.config = SimpleNamespace(log_num_zeros_in_grad=False)
        self.infinite = False

    def prepare_grads(self) -> bool:
        return self.infinite

    def get_grad_norm(self) -> float:
        return 1.0


def replaced() -> tuple[Session, Training]:
    """
    Return a session and a training whose optimizer step tft has replaced by its own.
    """
    session = Session()
    training = Training(
        chunks=(), optimizer=Optimizer(), scheduler=Scheduler(), data=None, increment=lambda: 8
    )
    Replaced(session, training).install()
    return session, training


def test_the_scheduler_is_stepped_once_in_the_window() -> None:
    """When the script steps the optimizer and then the scheduler, then the scheduler has been
    stepped once, in the window."""
    session, training = replaced()
    assert training.optimizer.step() == (True, 1.0, None)
    assert (session.windows, training.scheduler.num_steps) == (["open", "closed"], 8)
    training.scheduler.step(increment=8)
    assert training.scheduler.num_steps == 8


def test_a_skipped_step_opens_a_window_and_does_not_step_the_scheduler() -> None:
    """When gradients are infinite, then a window opens and closes, and the scheduler is not
    stepped."""
    session, training = replaced()
    training.optimizer.infinite = True
    assert training.optimizer.step() == (False, None, None)
    assert (session.windows, training.scheduler.num_steps) == (["open", "closed"], 0)


def test_timers_begin_without_a_barrier_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """When Megatron's timers have barriers, then they begin without a barrier in the update window,
    and with one outside of it."""
    weight = torch.zeros(1, requires_grad=True)
    weight.main_grad = torch.ones(1)  # type: ignore[attr-defined]  # Megatron's own attribute
    timers = Timers(1, "minmax")
    part = FP32Optimizer.__new__(FP32Optimizer)  # its __init__ needs a device
    part.config = OptimizerConfig(timers=timers, barrier_with_L1_time=True, clip_grad=0.0)
    part.optimizer = torch.optim.SGD([weight], lr=1.0)
    part.is_stub_optimizer = False
    session, training = replaced()
    training.optimizer.chained_optimizers.append(part)
    training.optimizer.prepare_grads = part.prepare_grads
    windows: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.distributed, "barrier", lambda **_: windows.append([*session.windows])
    )
    training.optimizer.step()
    assert weight.item() == -1.0
    assert windows == [[]]
    assert "optimizer-inner-step" in timers._timers
    assert part.config.barrier_with_L1_time


def test_a_scheduler_step_that_differs_from_the_announced_one_is_refused() -> None:
    """When the script asks for another increment, steps the scheduler unasked, or leaves the step
    out, then an error says so."""
    _, training = replaced()
    with pytest.raises(UsageError, match="without a step of the optimizer before it"):
        training.scheduler.step(increment=8)
    training.optimizer.step()
    with pytest.raises(UsageError, match="called again before"):
        training.optimizer.step()
    with pytest.raises(UsageError, match=r"scheduler.step\(4\) was called, but tft .* by 8"):
        training.scheduler.step(increment=4)


def test_a_scheduler_step_after_a_skipped_step_is_refused() -> None:
    """When the script steps the scheduler after a step that was skipped, then the error says that
    it was skipped. When the next step is done, the scheduler may be stepped."""
    _, training = replaced()
    training.optimizer.infinite = True
    training.optimizer.step()
    with pytest.raises(
        UsageError, match=r"skipped, because gradients were NaN or infinite: .* True"
    ):
        training.scheduler.step(increment=8)
    training.optimizer.infinite = False
    training.optimizer.step()
    training.scheduler.step(increment=8)
    assert training.scheduler.num_steps == 8


def without_scheduler(momentum: float = 0.0) -> tuple[torch.optim.Optimizer, Training]:
    """Return a training whose optimizer is torch's, without a scheduler."""
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=momentum)
    chained = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=inner)], param_groups=inner.param_groups
    )
    return inner, Training(chunks=(), optimizer=chained, scheduler=None, data=None)


def test_a_scheduler_that_was_not_handed_over_is_refused() -> None:
    """When a script hands over no scheduler, although it has one of torch or Megatron for this
    optimizer, then an error says so. When the script has no scheduler, or one for another
    optimizer, the training is accepted."""
    inner, training = without_scheduler(momentum=0.9)
    other = torch.optim.lr_scheduler.ConstantLR(without_scheduler()[0])
    check_scheduler(training)
    unseen: Any = torch.optim.lr_scheduler.ConstantLR(inner)
    with pytest.raises(UsageError, match=r"scheduler \(ConstantLR\), .* hand over Megatron's"):
        check_scheduler(training)
    unseen.optimizer = other.optimizer
    check_scheduler(training)
    unseen = OptimizerParamScheduler(
        training.optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=1,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    with pytest.raises(
        UsageError,
        match=r"scheduler \(OptimizerParamScheduler\), but tft_megatron\.enable was given none",
    ):
        check_scheduler(training)
    assert unseen.optimizer is training.optimizer


def test_a_scheduler_that_is_not_megatrons_is_refused() -> None:
    """When the scheduler is torch's, which takes no increment, then the error names the expected
    one."""
    inner, training = without_scheduler()
    torchs = torch.optim.lr_scheduler.ConstantLR(inner)
    with pytest.raises(UsageError, match=r"OptimizerParamScheduler, not a torch\..*\.ConstantLR"):
        check_scheduler(dataclasses.replace(training, scheduler=torchs))


@pytest.mark.parametrize("of_experts", [False, True])
def test_a_muon_that_exchanges_momenta_in_the_update_is_refused(
    of_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When tensor-parallel ranks of Megatron's Muon would exchange momenta within the update, then an
    error names the setting. Without such ranks, or if each has blocks of its own, the optimizer
    is accepted."""
    sizes = [1, 1]
    for at, whose in enumerate(("tensor_model_parallel", "expert_tensor_parallel")):
        monkeypatch.setattr(parallel_state, f"get_{whose}_world_size", lambda at=at: sizes[at])
    inner = TensorParallelMuon.__new__(TensorParallelMuon)  # its __init__ needs another package
    inner.mode = "duplicated"
    parts = [SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=inner)]
    refuse_exchanging_muon(parts)
    sizes[of_experts] = 2
    with pytest.raises(
        UsageError, match=r"muon_tp_mode is duplicated, .* Set muon_tp_mode to block"
    ):
        refuse_exchanging_muon(parts)
    inner.mode = "blockwise"
    refuse_exchanging_muon(parts)


def test_begin_in_a_job_with_another_adaptor_is_refused_with_the_option() -> None:
    """When the script begins in a job that runs with another adaptor, then the error names the
    option to use."""
    with pytest.raises(UsageError, match="start it with tft run --adaptor megatron"):
        tft_megatron.begin(Session(adaptor="pytorch"))


def test_enable_before_begin_is_refused() -> None:
    """When a script calls `enable` without `begin`, then an error says so."""
    with pytest.raises(UsageError, match=r"call tft_megatron\.begin before the model"):
        tft_megatron.enable(Session(), [], None)


def test_sizes_that_do_not_fit_the_world_are_refused_without_trace() -> None:
    """When four ranks are to be split into groups of three, then the error has Megatron's own
    reason, and the attempt leaves no state in Megatron."""
    import torch.distributed as dist

    with pytest.raises(
        UsageError, match=r"groups of 4 ranks with these sizes: .*not divisible by 3"
    ):
        tft_megatron.begin(Session(), tensor_model_parallel_size=3)
    assert not dist.is_initialized()


def test_a_missing_megatron_is_reported_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When megatron-core cannot be imported, then the error names the package to install."""
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(UsageError, match=r"pip install 'tft-bus\[megatron\]'"):
        check_megatron()


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another minor version is installed, then the error names that version and the supported
    one."""
    monkeypatch.setattr(megatron.core, "__version__", "0.17.2")
    with pytest.raises(
        UsageError, match=r"megatron-core from 0\.16 on and before 0\.17, but 0\.17\.2"
    ):
        check_megatron()
