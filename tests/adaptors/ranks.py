"""
Rank processes for the tests of the PyTorch adaptor.

Each process holds a training state and calls the adaptor as a session would, one request of the
test at a time. A second thread answers the requests that a session's control thread would answer.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from tft_pytorch import Made, ReplicaOptimizer, adaptor, interruptible
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import swa_utils

PATIENCE = 30.0
"""Seconds a test waits for an answer before it fails."""

WIDTH = 256

INFINITE = 3
"""After this number of steps, one step has infinite gradients, if the recipe scales the loss."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """
    The configuration of a rank's training: the model, the optimizer and the form of a step.
    """

    optimizer: str = "adamw"
    norm: str = "layer"
    wrapped: bool = True
    wrapper: dict[str, Any] = field(default_factory=dict)  # Any: arguments of DDP
    backwards: int = 1
    """The number of micro-batches of a step. Each has its own all-reduces."""
    staged: bool = False
    """True if the wrapper is the only stage of a pipeline that has two micro-batches a step and
    all-reduces once."""
    scaled: bool = False
    """True if the loss is scaled. One step then has infinite gradients and is skipped, and there is
    a moving average."""
    copies: int = 0
    """The number of copies of each share of a `ReplicaOptimizer`. 0 means an ordinary optimizer."""
    dtype: torch.dtype = torch.float32
    gradients: torch.dtype | None = None
    """The type of the gradients, if it is not that of the parameters. DDP refuses such gradients,
    so there is no DDP, and the gradients are all-reduced after the backward pass."""
    compiled: bool = False
    """True if the model that is handed over is compiled. The backend changes nothing in it and
    needs no compiler."""
    own_steps: bool = False
    """True if in each step other parameters have no gradient, so that an optimizer counts different
    numbers of steps for them."""
    make: Callable[[], Made] | None = None
    """A factory that makes the model over process groups. If it is given, most other fields are not
    used."""


class Net(nn.Module):
    """
    A network with two megabytes of parameters, so that DDP makes several gradient buckets.

    The network has a tied and a frozen parameter, dropout, and a norm layer that may keep running
    statistics.
    """

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.norm = nn.BatchNorm1d(WIDTH) if norm == "batch" else nn.LayerNorm(WIDTH)
        self.mask: Tensor
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, WIDTH) to a tensor of the same shape.
        """
        x = self.first(x) + self.frozen
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(self.norm(x))))
        return self.last(x * self.mask)  # type: ignore[no-any-return]  # torch has no types here


class Batches:
    """
    Random batches that depend only on the rank and on the position in the data.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._position = 0

    def next(self) -> Tensor:
        """
        Advance the position by one and return the batch at the new position.
        """
        self._position += 1
        generator = torch.Generator().manual_seed(1000 * self._rank + self._position)
        return torch.randn(4, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position to the one in `state`.
        """
        self._position = state["position"]


def make_optimizer(
    recipe: Recipe, model: nn.Module, rank: int, world: int
) -> torch.optim.Optimizer:
    """
    Make the optimizer of a recipe with two parameter groups: matrices with weight decay, the rest
    without it.
    """
    kind = recipe.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if recipe.copies:
        return ReplicaOptimizer(
            groups, torch.optim.AdamW, rank=rank, world=world, copies=recipe.copies, lr=1e-3
        )
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-3) if kind == "tensor_lr" else 1e-3)


class Actor:
    """
    The object in a rank's process whose methods serve the requests of the test.
    """

    def adopt(self, rank: int, world: int, recipe: Recipe) -> None:
        """
        Build the training state as a script does, and hand the state to the adaptor.
        """
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.recipe, self.rank = recipe, rank
        self.data = Batches(rank)
        self.step = 0
        self.local_states: dict[int, bytes] = {}
        self.contributed: list[int] = []
        self.kept: list[Any] = []  # Any: whatever a test's function leaves
        self.schedule: Any = None  # Any: torch's schedules are not exported by name
        self.others: Mapping[str, Any] = {}  # Any: the values have different types
        adaptor.tft_watch(self.contributing, early=False)
        if recipe.make is not None:
            torch.manual_seed(100 + rank)
            adaptor.tft_adopt({"make": recipe.make, "data": self.data}, None)
            adaptor.tft_shards(rank, world)  # as a session does before any group is formed
            return
        self.net: Any = Net(recipe.norm).to(recipe.dtype)
        if recipe.gradients is not None:
            for parameter in self.net.parameters():
                parameter.grad_dtype = recipe.gradients
        self.optimizer: Any = make_optimizer(recipe, self.net, rank, world)
        self.scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(
            self.optimizer, [2, 4], gamma=0.5
        )
        torch.manual_seed(100 + rank)
        model = torch.compile(self.net, backend="eager") if recipe.compiled else self.net
        parts = {
            "model": model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
        }
        if recipe.scaled:
            average = swa_utils.AveragedModel(
                self.net,
                multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]  # torch has no types here
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            self.others = {"average": average, "scaler": scaler}
            parts["others"] = self.others
        wrapped = recipe.wrapped and recipe.gradients is None
        wrap = (lambda: DDP(model, **recipe.wrapper)) if wrapped else None
        adaptor.tft_adopt(parts, wrap)

    def contributing(self) -> None:
        """
        Note the step and capture the rank-local state before the rank contributes to an all-reduce.

        The adaptor calls this method in place of the session method with the same name.
        """
        self.contributed.append(self.step + 1)
        self.local_states[self.step + 1] = adaptor.tft_capture(closing=False)

    def form(self, name: str, port: int, rank: int, world: int) -> None:
        """
        Form the process groups, without rebuilding the model.
        """
        adaptor.tft_regroup(name, "127.0.0.1", port, rank, world)

    def build(self) -> None:
        """
        Rebuild the model over the current groups, and keep what the adaptor returns.
        """
        self.model = adaptor.tft_rebuild()
        if self.recipe.make is not None:
            self.made: Any = self.model
            made: Made = self.model
            self.model = self.net = made.model
            self.optimizer, self.scheduler, self.others = (
                made.optimizer,
                made.scheduler,
                made.others,
            )
        if self.recipe.staged:
            alone = next(
                group
                for group in [dist.new_group([rank]) for rank in range(dist.get_world_size())]
                if dist.get_rank(group) >= 0
            )
            half = torch.zeros(2, WIDTH, requires_grad=True)
            stage = PipelineStage(
                self.model, 0, 1, half.device, input_args=half, output_args=half, group=alone
            )
            self.schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.square().mean())

    def roll_back(self, step: int, local_state: bytes | None) -> None:
        """
        Roll back to the end of `step` with the given rank-local state.

        None means the state that this process captured itself at the end of `step`.
        """
        if local_state is None and step == 0 and 0 not in self.local_states:
            self.local_states[0] = adaptor.tft_capture(closing=False)
        if local_state is not None:
            # as in a job, where the page of a rank outlives its process
            self.local_states[step] = local_state
        adaptor.tft_rollback(self.local_states[step], step)
        self.step = step

    def train(self, last: int) -> list[tuple[str, str]]:
        """
        Train up to step `last`. Return the loss of each step and a digest of its all-reduced
        gradients.
        """
        told = []
        while self.step < last:
            told += self.train_without_sharing(self.step + 1)
            adaptor.tft_updated()
        return told

    def train_without_sharing(self, last: int) -> list[tuple[str, str]]:
        """
        Train up to step `last`, but do not exchange parameters between replicas after the updates.

        `train` differs only in its call of `tft_updated` after each step. Return the same values as
        `train`.
        """
        told = []
        while self.step < last:
            told.append(self.half_step())
            self.local_states[self.step + 1] = adaptor.tft_capture(closing=False)
            self.update()
            self.scheduler.step()
            self.local_states[self.step + 1] = adaptor.tft_capture(closing=True)
            self.step += 1
            self.optimizer.zero_grad()
        return told

    def update(self) -> None:
        """
        Apply the optimizer step. A loss scaler skips the step if the gradients are infinite.
        """
        scaler, average = self.others.get("scaler"), self.others.get("average")
        # With `copies`, the step updates only this rank's share of the parameters. An average that
        # is taken after the step would mix updated and older parameters.
        if average is not None and self.recipe.copies:
            average.update_parameters(self.net)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        if average is not None and not self.recipe.copies:
            average.update_parameters(self.net)

    def half_step(self) -> tuple[str, str]:
        """
        Run a step up to the opening of its update window: forward, backward and the all-reduce of
        the gradients.
        """
        for _ in range(self.recipe.backwards):
            batch = self.data.next().to(self.recipe.dtype)
            loss = self.pipeline(batch) if self.recipe.staged else self.whole(batch)
        if self.recipe.gradients is not None:
            self.contributing()
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        if self.recipe.make is not None:
            self.meet()
        if self.recipe.own_steps:
            for number, parameter in enumerate(self.net.parameters()):
                if (number + self.step) % 3 == 0:
                    parameter.grad = None
        digest = xxhash.xxh3_128()
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                digest.update(local(parameter.grad).view(torch.uint8).numpy().data)
        return float(loss).hex(), digest.hexdigest()

    def whole(self, batch: Tensor) -> Tensor:
        """
        Run the forward and the backward pass over one batch, and return the loss.
        """
        loss: Tensor = self.model(batch).square().mean()
        scaled = loss
        if "scaler" in self.others:
            scaled = self.others["scaler"].scale(loss)
            if self.step == INFINITE:
                scaled = scaled * float("inf")
        scaled.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        return loss

    def meet(self) -> None:
        """
        Scale the gradients by the norm of the whole model, which is all-reduced over all ranks.

        Scripts that clip gradients do the same. Without this all-reduce, groups that all-reduce
        separately could be one step apart.
        """
        grads = [local(p.grad) for p in self.net.parameters() if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(norm)
        for grad in grads:
            grad.mul_(1.0 / (1.0 + norm.sqrt().nan_to_num(1.0)))

    def pipeline(self, batch: Tensor) -> Tensor:
        """
        Run the forward and the backward pass as a pipeline schedule, and return the mean loss.
        """
        losses: list[Tensor] = []
        self.schedule.step(batch, target=batch, losses=losses)
        return torch.stack(losses).mean()

    def local_state(self, step: int) -> bytes:
        """
        Return the rank-local state that was captured at the end of `step`.
        """
        return self.local_states[step]

    def interrupt(self) -> None:
        """
        Run half a step and open its update window, then stop as if another rank had failed.
        """
        self.half_step()
        adaptor.tft_capture(closing=False)

    def clear(self) -> None:
        """
        Drop all references to the model and let the adaptor clear the process groups.

        A session does the same after an exception has left the training loop.
        """
        self.model = self.schedule = None
        if self.recipe.make is not None:
            self.made = self.net = self.optimizer = self.scheduler = None
            self.others = {}
        adaptor.tft_clear()

    def shards(self, world: int) -> dict[str, tuple[int, ...]]:
        """
        Return each shard that this rank holds, with all ranks that hold a copy.
        """
        return {copies.shard: copies.ranks for copies in adaptor.tft_shards(self.rank, world)}

    def give(self, shard: str) -> tuple[str, bytes, list[bytes]]:
        """
        Return the name, the metadata and the buffer contents of a shard.
        """
        payload = adaptor.tft_give(shard, self.step, kept=False)
        return shard, payload.meta, [bytes(buffer.view) for buffer in payload.buffers]

    def take(self, shard: str, meta: bytes, contents: list[bytes]) -> None:
        """
        Replace a shard of this rank with the `contents` from another rank.
        """
        buffers = adaptor.tft_take(shard, meta)
        for buffer, content in zip(buffers, contents, strict=True):
            buffer.view[:] = content
        adaptor.tft_taken(shard, meta)

    def save(self, directory: Path, shard: str = "dense") -> list[str]:
        """
        Save one shard of a checkpoint in `directory`, and return the names of the files.
        """
        return list(adaptor.tft_save(directory, shard))

    def save_own(self, directory: Path, shard: str = "dense") -> None:
        """
        Save one shard with `torch.save`, as a script's own function would.

        Also write the additional bytes that the adaptor stores beside such a file.
        """
        whole = self.optimizer
        own = whole.optim if isinstance(whole, ReplicaOptimizer) else whole
        state = {
            "model": self.net.state_dict(),
            "optimizer": own.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "masters": self.masters(),
        }
        torch.save(state, directory / shard)
        (directory / f"{shard}.beside").write_bytes(adaptor.tft_beside(shard))

    def load_own(self, directory: Path, world: int = 1) -> None:
        """
        Load the files that `save_own` wrote.
        """
        for shard in self.shards(world):
            state = torch.load(directory / shard)
            if shard == "dense":
                self.net.load_state_dict(state["model"])
                self.scheduler.load_state_dict(state["scheduler"])
            if isinstance(self.optimizer, ReplicaOptimizer):
                if shard != "dense":
                    self.optimizer.optim.load_state_dict(state["optimizer"])
                    for master, read in zip(self.masters(), state["masters"], strict=True):
                        master.copy_(read)
            else:
                self.optimizer.load_state_dict(state["optimizer"])
            adaptor.tft_replaced(shard, (directory / f"{shard}.beside").read_bytes())

    def masters(self) -> list[Tensor]:
        """
        Return the 32-bit master copies that the optimizer keeps for 16-bit parameters.
        """
        if not isinstance(self.optimizer, ReplicaOptimizer):
            return []
        found = (self.optimizer.master(p) for p in self.optimizer.owned)
        return [master for master in found if master is not None]

    def join(self, directory: Path) -> list[str]:
        """
        Let the adaptor join the saved parts of a checkpoint, and return the names of the files.
        """
        files = [str(file.relative_to(directory)) for file in directory.glob("*/*")]
        return list(adaptor.tft_join(directory, files))

    def load(self, directory: Path, world: int = 1) -> None:
        """
        Load all shards of this rank that `save` wrote.
        """
        for shard in self.shards(world):
            adaptor.tft_load(directory, shard)

    def share(self, world: int) -> dict[str, str]:
        """
        Return a digest of each shard that this rank holds, by shard name.
        """
        digests = {}
        for shard in self.shards(world):
            payload = adaptor.tft_give(shard, self.step, kept=False)
            digest = xxhash.xxh3_128(payload.meta)
            for buffer in payload.buffers:
                digest.update(buffer.view)
            digests[shard] = digest.hexdigest()
        return digests

    def digests(self) -> dict[str, str]:
        """
        Return the adaptor's digests of the final state, as at the end of a job.
        """
        return dict(adaptor.tft_digests())

    def damage(self) -> None:
        """
        Overwrite the parameters with NaN, clear the optimizer state and step the scheduler, so that
        the whole state is wrong.
        """
        with torch.no_grad():
            for parameter in self.net.parameters():
                local(parameter).fill_(float("nan"))
        for kept in self.optimizer.state.values():
            kept.clear()
        self.scheduler.step()

    def all_reduce(self) -> float:
        """
        All-reduce a tensor of ones over all ranks, and return its first element.
        """
        ones = torch.ones(100_000)
        dist.all_reduce(ones)
        return float(ones[0])

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # Any: any values
        """
        Call a function of the test with this actor and the arguments.
        """
        return function(self, *arguments)

    def call_off(self) -> None:
        """
        Stop all waits for other ranks, as `quiesce` does if closing connections wakes no thread.
        """
        interruptible.call_off()

    def quiesce(self) -> None:
        """
        Let the adaptor stop all waits for other ranks. The second thread runs this request.
        """
        adaptor.tft_quiesce()

    def waits(self) -> bool:
        """
        Return whether the training thread may be waiting for other ranks. The second thread runs
        this request.
        """
        return adaptor.tft_waiting(sys._current_frames()[_main_thread()])

    def forms(self) -> bool:
        """
        Return whether the training thread is forming a process group. The second thread runs this
        request.
        """
        frame: FrameType | None = sys._current_frames()[_main_thread()]
        while frame is not None and frame.f_code.co_name != "tft_regroup":
            frame = frame.f_back
        return frame is not None


def local(tensor: Tensor) -> Tensor:
    """
    Return the part of a distributed tensor that this rank holds, or the tensor itself.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def perform(work: Connection, control: Connection) -> None:
    """
    Serve the requests in a rank's process.

    Requests of `work` run on the main thread, requests of `control` on a second thread.
    """
    actor = Actor()
    threading.Thread(target=_serve, args=(actor, control), daemon=True).start()
    _serve(actor, work)


def _serve(actor: Actor, requests: Connection) -> None:
    while True:
        try:
            name, arguments = requests.recv()
        except EOFError:
            return
        try:
            answer = getattr(actor, name)(*arguments)
        except Exception as error:  # noqa: BLE001 (the answer carries the error to the test)
            kind = adaptor.tft_classify(error)
            answer = Failure(f"{type(error).__name__}: {error}", kind)
        requests.send(answer)


@dataclass(frozen=True)
class Failure:
    """
    The text of an exception that a request raised, and the fault kind that the adaptor gives it.
    """

    words: str
    kind: str | None


class Rank:
    """
    The process of one rank, as the test controls it.
    """

    def __init__(self, context: ForkServerContext) -> None:
        self._work, work = context.Pipe()
        self._control, control = context.Pipe()
        self.process: BaseProcess = context.Process(target=perform, args=(work, control))
        self.process.start()
        work.close()
        control.close()

    def tell(self, request: str, *arguments: Any) -> None:  # Any: any request
        """
        Send a request to the training thread without waiting for the answer.
        """
        self._work.send((request, arguments))

    def hear(self) -> Any:  # Any: any request
        """
        Wait for the oldest open answer and return it. The answer is a `Failure` if the request
        raised.
        """
        return _await(self._work)

    def ask(self, request: str, *arguments: Any) -> Any:  # Any: any request
        """
        Send a request to the training thread and return the answer. Fail the test if the request
        raised.
        """
        self.tell(request, *arguments)
        return sound(self.hear())

    def interject(self, request: str, *arguments: Any) -> Any:  # Any: any request
        """
        Send a request to the second thread and return the answer. Fail the test if the request
        raised.
        """
        self._control.send((request, arguments))
        return sound(_await(self._control))

    def await_waiting(self) -> None:
        """
        Wait until the training thread waits for other ranks.
        """
        while not self.interject("waits"):
            pass

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """
        Suspend the process with SIGSTOP while the `with` block runs.
        """
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """
        Kill the process with SIGKILL and wait for its end.
        """
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """
        Kill the process and close its connections.
        """
        self.kill()
        self.process.close()
        self._work.close()
        self._control.close()


def _await(connection: Connection) -> Any:  # Any: any request
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"no answer within {PATIENCE:.0f} s")
    return connection.recv()


def sound(answer: Any) -> Any:  # Any: any request
    """
    Return the answer of a request. Fail the test if the answer is a `Failure`.
    """
    assert not isinstance(answer, Failure), answer
    return answer
