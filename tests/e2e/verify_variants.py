"""
A small DDP job with one habit of real scripts, for tests of `tft verify`.

    verify_variants.py HABIT [--lost]

Without `--lost`, the script hands over what the habit needs, or tft refuses the habit. With `--lost`,
what the habit needs is not kept: the script does not hand it over, or a part of the adaptor is
switched off.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tft_pytorch import Made, Prefetcher
from tft_pytorch.extra import ExtraStates
from tft_pytorch.forward_buffers import RunningBuffers
from tft_pytorch.gradients import Gradients
from tft_pytorch.modes import Modes
from tft_pytorch.module_attributes import ModuleAttributes
from tft_pytorch.rank_local_state import RankLocalState
from tft_pytorch.rehearsal import Rehearsal
from tft_pytorch.trees import Disassembly
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # it has no types
    StatefulDataLoader,
)

import tft

WIDTH = 8

parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--lost", action="store_true")
args = parser.parse_args()
habit, kept = args.habit, not args.lost


def nothing(*_: object, **__: object) -> None:
    """
    Stand in for the part of the adaptor that is switched off.
    """


OFF: dict[str, list[tuple[type, str]]] = {
    "loader": [(RankLocalState, "_put_random_back")],
    "seeds": [(RankLocalState, "_put_random_back")],
    "evaluates": [(Modes, "put_back")],
    # the count is in the extra state of the module, and it is a plain attribute of the module
    "tells": [(ExtraStates, "put_back"), (ModuleAttributes, "put_back")],
    "counts": [(RunningBuffers, "restore")],
    "preconditions": [(Rehearsal, "closing")],
    "hides": [(Rehearsal, "closing")],
    "zeroes": [(Gradients, "put_back")],
}
if not kept:
    for part, method in OFF.get(habit, ()):
        setattr(part, method, nothing)
if habit == "preconditions" and not kept:
    take_apart = Disassembly.take_apart
    Disassembly.take_apart = lambda self, value, name: (  # type: ignore[method-assign, assignment]
        None if isinstance(value, Factors) else take_apart(self, value, name)
    )


class Net(nn.Module):
    """
    A small network with dropout. It counts its inputs if the habit needs it, and leaves out its branch
    in every third call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.seen: Tensor
        if habit == "counts":
            self.register_buffer("seen", torch.zeros(()))
        if habit == "zeroes":
            self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Map a (batch, WIDTH) tensor to a tensor of the same shape.
        """
        found: Tensor = self.last(torch.tanh(self.dropout(self.first(x))))
        if habit == "counts":
            if self.training:
                self.seen += x.abs().sum()
            found = found * (1.0 + 0.01 * self.seen)
        return self.side(x) + found if habit == "zeroes" and step % 3 else found


class Telling(Net):
    """
    A network that counts its calls in its extra state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        """
        Return the count.
        """
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """
        Restore the count.
        """
        self.calls = state["calls"]

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Scale the output by the count.
        """
        self.calls += self.training
        return super().forward(x, step) * (1.0 + 0.1 * self.calls)


@dataclass
class Factors:
    """
    The factors of a preconditioner.
    """

    left: Tensor


class Preconditioned(torch.optim.SGD):
    """
    An optimizer with a dataclass in its state.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Change the factors, scale the gradients by them, and make the step of SGD.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["factors"] = state.get("factors") or Factors(torch.ones(()))
                state["factors"].left.mul_(1.1)
                parameter.grad.mul_(state["factors"].left)
        return super().step(closure)


class Momentum(torch.optim.SGD):
    """
    An optimizer with its state in an attribute.
    """

    def __init__(self, params: Any, lr: float) -> None:  # Any: as in torch
        super().__init__(params, lr=lr)
        self.velocity: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Update the velocity of each parameter and apply it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                known = self.velocity.setdefault(parameter, torch.zeros_like(parameter))
                known.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(known, alpha=-group["lr"])


class Source:
    """
    Batches that are drawn from a generator of their own, whose position is a number.
    """

    def __init__(self) -> None:
        self._position = 0

    def next(self) -> Tensor:
        """
        Return the next batch, (4, WIDTH).
        """
        self._position += 1
        generator = torch.Generator().manual_seed(1000 * session.rank + self._position)
        return torch.randn(4, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Go to a position.
        """
        self._position = state["position"]


session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(session.rank)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "preconditions": Preconditioned,
    "hides": Momentum,
}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """
    Return the model and the optimizer.
    """
    model = Telling() if habit == "tells" else Net()
    return model, OPTIMIZERS.get(habit, torch.optim.AdamW)(model.parameters(), lr=0.01)


def make() -> Made:
    """
    Return the DDP model and its optimizer.
    """
    torch.manual_seed(0)
    model, optimizer = build()
    return Made(model=DDP(model, forward_sync_buffers=False), optimizer=optimizer)


model, optimizer = build()
scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=habit == "scaler")
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1.0 + epoch))
ema = AveragedModel(model)
torch.manual_seed(100 + session.rank)
inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(session.rank))
loader: Any = StatefulDataLoader(inputs, batch_size=4, shuffle=True)  # Any: it has no types
source = Source()
prefetcher = Prefetcher(source)


def after(model: nn.Module, step: int) -> None:
    """
    Run the tail of a step.
    """
    if habit == "scheduler":
        scheduler.step()
    if habit == "ema":
        ema.update_parameters(model)
    if habit == "scaler":
        scaler.update()
    if habit == "evaluates" and step % 2 == 0:
        model.eval()
        with torch.no_grad():
            loss = model(torch.ones(2, WIDTH), step).mean()
        dist.all_reduce(loss)
        model.train()


def batch_of(step: int, ahead: list[Tensor], loaded: list[Any]) -> Tensor:
    """
    Return the batch of a step, in the way of the habit.
    """
    if habit == "prefetch":
        return prefetcher.next() if kept else ahead.pop() if ahead else source.next()
    if habit == "broadcast":
        batch = source.next() if session.rank == 0 else torch.empty(4, WIDTH)
        dist.broadcast(batch, 0)
        return batch
    if habit == "loader":
        if not loaded:
            loaded.append(iter(loader))
        found = next(loaded[0], None)
        if found is None:
            loaded[0] = iter(loader)
            found = next(loaded[0])
        return found  # type: ignore[no-any-return]  # torchdata has no types
    generator = torch.Generator().manual_seed(1000 * session.rank + step)
    return torch.randn(4, WIDTH, generator=generator)


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    wrapped, steps = session.model, optimizer
    if habit == "counts":
        wrapped, steps = wrapped.model, wrapped.optimizer
    ahead: list[Tensor] = []
    loaded: list[Any] = []
    for step in session.steps(100):
        if habit == "seeds" and step % 4 == 1:
            torch.manual_seed(step)
        loss = wrapped(batch_of(step, ahead, loaded), step).square().mean()
        if habit == "prefetch":
            prefetcher.ahead() if kept else ahead.append(source.next())
        if habit == "random":
            loss = loss * (1.0 + random.random())
        if habit == "ema":
            session.record({"ema": sum(p.sum().item() for p in ema.parameters())})
        scaler.scale(loss).backward()
        with session.update():
            scaler.step(steps)
        steps.zero_grad(set_to_none=habit != "zeroes")
        after(wrapped.module, step)


HANDED: dict[str, dict[str, Any]] = {
    "prefetch": {"data": prefetcher if kept else source},
    "loader": {"data": loader},
    "broadcast": {"data": source} if kept else {},
    "scheduler": {"scheduler": scheduler} if kept else {},
    "ema": {"others": {"ema": ema}} if kept else {},
    "scaler": {"others": {"scaler": scaler}} if kept else {},
    "random": {"rng": ("torch", "python")} if kept else {},
}
if habit == "counts":
    session.adopt(make=make)
else:
    session.adopt(
        model=model,
        optimizer=optimizer,
        wrap=lambda: DDP(model, find_unused_parameters=habit == "zeroes"),
        **HANDED.get(habit, {}),
    )
session.run(train)
