"""
A DDP job with one habit of real scripts, in which a rank can die while the code of the habit runs.
Each job also has a scheduler, a moving average of the parameters, and batches with a position.

    habits_job.py HABIT [--make] [--die RANK,STEP]

At the end, each rank records its whole state: the digests of tft, and the state that the script
reads from the objects itself.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from sys import path
from typing import Any

import torch
import torch.distributed as dist
from tft_pytorch import Made, Prefetcher
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # it has no types
    StatefulDataLoader,
)

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.e2e.job_parts import WIDTH, Batches, averaged, whole_state


class Net(nn.Module):
    """
    A small network with dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Map a (batch, WIDTH) tensor to a tensor of the same shape. `step` is not used.
        """
        del step
        return self.last(torch.tanh(self.dropout(self.first(x))))  # type: ignore[no-any-return]  # torch has no types here


class Counting(Net):
    """
    A network whose forward pass counts its input rows, as layers of experts do. The output depends
    on the count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Scale the output of `Net` by the count. In training mode, count the input first.
        """
        if self.training:
            self.seen += x.abs().sum()
        return super().forward(x, step) * (1.0 + 0.01 * self.seen)


class Branching(Net):
    """
    A network that uses only a part of its parameters in every third step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Leave out the branch `side` in every third step.
        """
        found: Tensor = super().forward(x, step)
        return found if step % 3 == 0 else found + self.side(x)


class Waking(Counting):
    """
    A network with a count of its steps and, from step 6 on, a count of its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.every: Tensor
        self.register_buffer("every", torch.zeros(()))

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Count the step. Count the input from step 6 on.
        """
        if self.training:
            self.every += 1
        if step >= 6:
            return super().forward(x, step)
        return Net.forward(self, x, step)


class Telling(Net):
    """
    A network whose count is a Python number, kept in the extra state of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.scale = torch.ones(3)

    def get_extra_state(self) -> dict[str, object]:
        """
        Return the count and the scales.
        """
        return {"seen": self.seen, "scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:  # Any: values of several types
        """
        Restore the count and the scales.
        """
        self.seen, self.scale = state["seen"], state["scale"].clone()

    def forward(self, x: Tensor, step: int) -> Tensor:
        """
        Count the calls in training mode, and scale the output of `Net`.
        """
        if self.training:
            self.seen += 1
            self.scale *= 1.01
        return super().forward(x, step) * self.scale.mean() * (1.0 + 0.1 * self.seen)


class Momentum(torch.optim.SGD):
    """
    An optimizer that keeps the state of its parameters in an attribute.
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


@dataclass
class Factors:
    """
    The factors of a preconditioner.
    """

    left: Tensor


class Preconditioned(torch.optim.SGD):
    """
    An optimizer that keeps a dataclass in the state of each parameter, as Distributed Shampoo does.
    """

    def step(self, closure: Any = None) -> Any:  # Any: as in torch
        """
        Update the factors, and apply the step of SGD.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                known = self.state[parameter].setdefault("factors", Factors(torch.ones(2)))
                known.left.mul_(1.1)
        return super().step(closure)


class Habit:
    """
    A script without habits. Each subclass has one habit.
    """

    net: Callable[[], nn.Module] = Net
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    wrapper: Mapping[str, Any] = {}  # Any: arguments of DDP
    drops = True
    """True: the script drops the gradients. False: the script sets them to zero."""
    scales = False
    """Whether the script scales its loss."""
    loads = False
    """Whether the batches come from a loader of torchdata, which has no generator of its own."""
    shares = False
    """Whether this loader has a `DistributedSampler`, and three batches in an epoch."""
    prefetches = False
    """Whether the script reads the next batch between forward and backward pass."""

    def before(self, step: int, die: Callable[[], None]) -> None:
        """
        Run the code between forward and backward pass. Here the victim dies.
        """
        die()

    def ready(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, die: Callable[[], None]
    ) -> None:
        """
        Run the code between backward pass and update window. The default does nothing.
        """

    def after(self, model: nn.Module, step: int, die: Callable[[], None]) -> None:
        """
        Run the code after the update window. The default does nothing.
        """


class Evaluates(Habit):
    """
    The script evaluates at the end of every third step, and the ranks sum the losses.
    """

    def before(self, step: int, die: Callable[[], None]) -> None:
        """
        Do nothing. The victim dies in `after` instead.
        """

    def after(self, model: nn.Module, step: int, die: Callable[[], None]) -> None:
        """
        Evaluate outside training mode in every third step. The victim dies before the all-reduce.
        """
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                loss = model(torch.ones(2, WIDTH), step).square().mean()
            die()
            dist.all_reduce(loss)
            model.train()


class Counts(Habit):
    """
    The script counts in a buffer of the model, in the forward pass.
    """

    net = Counting


class Wakes(Habit):
    """
    The script has a buffer that first changes in the step in which a rank dies, and another that
    changes in every step.
    """

    net = Waking


class Tells(Habit):
    """
    The script counts in the extra state of a module, in the forward pass.
    """

    net = Telling


class Zeroes(Habit):
    """
    The script sets gradients to zero instead of None, also those of parameters that a step does not
    use.
    """

    net = Branching
    wrapper: Mapping[str, Any] = {"find_unused_parameters": True}  # Any: arguments of DDP
    drops = False


class Freezes(Habit):
    """
    The script freezes a part of the model after the update window of step 3. DDP itself accepts
    that.
    """

    wrapper: Mapping[str, Any] = {"find_unused_parameters": True}  # Any: arguments of DDP

    def after(self, model: nn.Module, step: int, die: Callable[[], None]) -> None:
        """
        Freeze the first layer, as scripts do that train the parts of a model one after the other.
        """
        if step == 3:
            model.get_submodule("first").requires_grad_(False)


class Hides(Habit):
    """
    The script has an optimizer that keeps its state in an attribute.
    """

    optimizer = Momentum


class Preconditions(Habit):
    """
    The script has an optimizer with dataclasses in its state.
    """

    optimizer = Preconditioned


class Unscales(Habit):
    """
    The script unscales and clips the gradients. All ranks sum the norms before the window.
    """

    scales = True

    def before(self, step: int, die: Callable[[], None]) -> None:
        """
        Do nothing. The victim dies in `ready` instead.
        """

    def ready(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, die: Callable[[], None]
    ) -> None:
        """
        Unscale and clip the gradients, and all-reduce the norms.

        The victim dies before the all-reduce. The other ranks have unscaled their gradients by then
        and cannot complete the step.
        """
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        die()
        dist.all_reduce(norm)


class Loads(Habit):
    """
    The script takes shuffled batches from a `StatefulDataLoader` without a generator.
    """

    loads = True


class Shares(Loads):
    """
    The script takes the batches from a `StatefulDataLoader` with a `DistributedSampler`.
    """

    shares = True


class Prefetches(Habit):
    """
    The script reads the next batch while the device computes, as nanoGPT does. The victim dies when
    it has read that batch.
    """

    prefetches = True


HABITS: Mapping[str, type[Habit]] = {
    "none": Habit,
    "evaluates": Evaluates,
    "counts": Counts,
    "tells": Tells,
    "hides": Hides,
    "wakes": Wakes,
    "zeroes": Zeroes,
    "freezes": Freezes,
    "preconditions": Preconditions,
    "unscales": Unscales,
    "loads": Loads,
    "shares": Shares,
    "prefetches": Prefetches,
}


parser = argparse.ArgumentParser()
parser.add_argument("habit", choices=HABITS)
parser.add_argument("--make", action="store_true")
parser.add_argument("--die")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

session = tft.init()
rank = session.rank
habit = HABITS[args.habit]()
victim, fatal = map(int, args.die.split(",")) if args.die else (-1, -1)
record = Record(session.run_dir, rank)
torch.set_num_threads(1)
scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=habit.scales)
inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * rank))
torch.manual_seed(rank)  # the loader draws the seed of its data order from torch's generator
# Any: the sampler is one of items of a tensor, which torch's types do not know
sampler: Any = DistributedSampler[Any](inputs, session.world, rank) if habit.shares else None  # type: ignore[arg-type]  # a tensor has items
loader: Any = (  # Any: torchdata has no types
    StatefulDataLoader(inputs, batch_size=2 if sampler else 4, shuffle=not sampler, sampler=sampler)
    if habit.loads
    else None
)
source = Batches(rank)
prefetcher = Prefetcher(source)
data = loader if habit.loads else prefetcher if habit.prefetches else source


def build() -> Made:
    """
    Return the model, the optimizer and the objects beside them, the same on every rank.
    """
    torch.manual_seed(0)
    model = habit.net()
    optimizer = habit.optimizer(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
    others = {"average": averaged(model)}
    return Made(model=model, optimizer=optimizer, scheduler=scheduler, others=others)


def make() -> Made:
    """
    Return the objects that are made over the process groups, such as the DDP model.
    """
    made = build()
    return replace(made, model=DDP(made.model, forward_sync_buffers=False, **habit.wrapper))


def die() -> None:
    """
    Kill this process once, if it is the victim and at the fatal step.
    """
    if (rank, session.step) == (victim, fatal) and session.incarnation == 0:
        os.kill(os.getpid(), signal.SIGKILL)


if args.make:
    torch.manual_seed(100 + rank)
    session.adopt(make=make, data=data)
else:
    adopted = build()
    torch.manual_seed(100 + rank)
    session.adopt(
        model=adopted.model, optimizer=adopted.optimizer, scheduler=adopted.scheduler,
        others={**adopted.others, **({"scaler": scaler} if habit.scales else {})},
        data=data, wrap=lambda: DDP(adopted.model, **habit.wrapper),
    )  # fmt: skip


def batches(session: tft.Session) -> Iterator[tuple[int, Tensor]]:
    """
    Yield the remaining steps, each with a batch of inputs.
    """
    loaded = iter(loader) if habit.loads else iter(())
    for step in session.steps(args.steps):
        if not habit.loads:
            yield step, (prefetcher if habit.prefetches else source).next()
            continue
        batch = next(loaded, None)
        if batch is None:  # the epoch is over, and the next one begins
            if habit.shares:
                sampler.set_epoch((step - 1) // len(loader))
            loaded = iter(loader)
            batch = next(loaded)
        yield step, batch


def train(session: tft.Session) -> None:
    made = session.model if args.make else adopted
    wrapped = made.model if args.make else session.model
    for step, batch in batches(session):
        loss = wrapped(batch, step).square().mean()
        if habit.prefetches:
            prefetcher.ahead()
        habit.before(step, die)
        scaler.scale(loss).backward()
        record.write(step, loss.item())
        habit.ready(wrapped.module, made.optimizer, die)
        with session.update():
            scaler.step(made.optimizer)
            scaler.update()
        made.optimizer.zero_grad(set_to_none=habit.drops)
        made.scheduler.step()
        made.others["average"].update_parameters(wrapped.module)
        habit.after(wrapped.module, step, die)


session.run(train)
done = session.model if args.make else adopted
net: nn.Module = done.model.module if args.make else done.model
record.finish(
    whole_state(session, net, done.optimizer, done.scheduler, done.others["average"], scaler)
)
