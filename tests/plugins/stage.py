"""
A process that plays the session of one rank around a small real model, for the tests of chaos.

The process leaves evidence that is independent of chaos's own record: a line for every place that
it reaches, and a file that is the memory of its parameters and can be read after its death.
"""

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tft_chaos import VARIABLE, tft_opened
from tft_chaos.actions import ChaosMissed
from tft_pytorch import ReplicaOptimizer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.plugins.view import View
from tft.protocol.messages import OrderName


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """
    The script of one process.
    """

    run_dir: Path
    chaos: tuple[str, ...]
    rank: int = 0
    world: int = 1
    incarnation: int = 0
    first: int = 1
    last: int = 4
    orders: tuple[tuple[OrderName, int], ...] = ()
    """Orders, each with its incident, carried out before the first step."""
    groups: int = 2
    """The number of parameter groups of the optimizer."""
    evaluates: bool = False
    """The model is called after each step, too."""
    masters: bool = False
    """The parameters are bfloat16, and a ReplicaOptimizer keeps masters of them."""

    def file(self, name: str) -> Path:
        """
        Return the path of one of the files that this process writes.
        """
        return self.run_dir / f"{name}-{self.rank}.{self.incarnation}"

    def places(self, step: int) -> list[str]:
        """
        Return the places that the process reached in one step, in order.
        """
        return [place for number, _, place in self._trace() if number == step]

    def at(self, step: int, place: str) -> float:
        """
        Return the time at which the process reached a place (CLOCK_MONOTONIC).
        """
        (moment,) = (at for number, at, name in self._trace() if (number, name) == (step, place))
        return moment

    def ticks(self) -> tuple[int, int]:
        """
        Return how far the second thread of the process has counted.
        """
        thread, number = struct.unpack("qq", self.file("ticks").read_bytes())
        return thread, number

    def flips(self, step: int) -> dict[str, list[tuple[int, int]]]:
        """
        Return what differs after the notice of the closed window, by kind and name of the tensor:
        the elements and their bits.
        """
        (text,) = (p for p in self.places(step) if p.startswith("bits flipped "))
        found = json.loads(text.removeprefix("bits flipped "))
        return {name: [(element, bit) for element, bit in each] for name, each in found.items()}

    def gradients(self, step: int) -> dict[str, bytes]:
        """
        Return the gradients with which the optimizer made the update, by name.
        """
        (text,) = (p for p in self.places(step) if p.startswith("gradients "))
        found = json.loads(text.removeprefix("gradients "))
        return {name: bytes.fromhex(content) for name, content in found.items()}

    def durations(self, step: int) -> tuple[float, float]:
        """
        Return the seconds of the model's computation in one step, and of the whole call.
        """
        model, call = json.loads(self.file("times").read_text())[str(step)]
        return model, call

    def _trace(self) -> Iterator[tuple[int, float, str]]:
        for line in self.file("trace").read_text().splitlines():
            step, at, place = line.split(" ", 2)
            yield int(step), float(at), place


class Small(nn.Module):
    """
    A model with four parameters in two layers.
    """

    def __init__(self, place: "Tracer") -> None:
        super().__init__()
        self.place = place
        self.took = 0.0
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.linspace(-1.0, 2.0, 6))

    @property
    def dtype(self) -> torch.dtype:
        """
        The type of the parameters.
        """
        return next(self.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        self.place("model entered")
        began = time.monotonic()
        loss: Tensor = self.layers(x).square().mean()
        self.took = time.monotonic() - began
        self.place("model left")
        return loss


class Tracer:
    """
    Records where the process is. Each line is in the file before the process continues.
    """

    def __init__(self, scene: Scene, view: View) -> None:
        self._view = view
        self._file = scene.file("trace").open("ab", buffering=0)

    def __call__(self, place: str) -> None:
        self._file.write(f"{self._view.step} {time.monotonic()} {place}\n".encode())


def play(scene: Scene) -> None:
    """
    Train from `first` to `last`. An exception is recorded, and the step is computed again, as after
    a `retry`.
    """
    torch.set_num_threads(1)
    os.environ[VARIABLE] = json.dumps(scene.chaos)
    view = View(
        rank=scene.rank,
        incarnation=scene.incarnation,
        world=scene.world,
        run_dir=scene.run_dir,
        step=scene.first,
    )
    place = Tracer(scene, view)
    tick(scene)
    chaos: Any = tft_opened(session=view) or Bystander()  # Any: whatever a plugin returns

    torch.manual_seed(1)
    model = Small(place)
    if scene.masters:
        model.to(torch.bfloat16)
    memory = share_memory(model, scene.file("memory"))
    for name, parameter in model.named_parameters():
        came = partial(trace_gradient, place, name)
        parameter.register_hook(came)  # type: ignore[no-untyped-call] # torch leaves it untyped
    optimizer = make_optimizer(model, scene)
    with suppress(ChaosMissed):  # as a session, which only logs it
        chaos.tft_on_adopted(parts={"model": model, "optimizer": optimizer})
    wrapped = wrap(model, scene, place)
    for order, incident in scene.orders:
        place(f"order {order}")
        chaos.tft_on_order(order=order, incident=incident, step=view.step)

    times: dict[int, tuple[float, float]] = {}
    while view.step <= scene.last:
        try:
            place("batch taken")
            # chaos must not take this call of a submodule for a call of the model
            model.layers[0](torch.zeros(4, dtype=model.dtype))
            began = time.monotonic()
            loss = wrapped(batch(view, model))
            times[view.step] = model.took, time.monotonic() - began
            place("backward entered")
            loss.backward()
            place(f"gradients {gradients(model)}")
            place("window opened")
            scene.file("before").write_bytes(content(memory))
            optimizer.step()
            place("window closed")
            before = state(model, optimizer)
            chaos.tft_on_window_closed(step=view.step)
            place(f"bits flipped {flipped(before, state(model, optimizer))}")
            optimizer.zero_grad()
            place("tail done")
            chaos.tft_on_tail_ending(step=view.step)
            place("step ended")
            view.step += 1
            if scene.evaluates:
                evaluate(model, view, place)
        except Exception as error:  # noqa: BLE001 (chaos and broken peers cause errors of any type)
            place(f"raised {type(error).__name__} {getattr(error, 'kind', None)}")
            if scene.world > 1:
                os._exit(1)  # its connections close, so that the other ranks do not wait
            optimizer.zero_grad()
    scene.file("times").write_text(json.dumps(times))
    place(f"end {loss.item().hex()}")


def evaluate(model: Small, view: View, place: Tracer) -> None:
    """
    Run the model after a step, as an evaluation does.
    """
    view.evaluating = True
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=model.dtype))
    view.evaluating = False
    place("evaluated")


def trace_gradient(place: Tracer, name: str, _: Tensor) -> None:
    """
    Record that the gradient of a parameter is computed, and not yet accumulated.
    """
    place(f"gradient of {name}")


class Bystander:
    """
    The object that replaces chaos in a rank that no spec names. It does nothing.
    """

    def tft_on_adopted(self, **_: object) -> None: ...
    def tft_on_window_closed(self, **_: object) -> None: ...
    def tft_on_tail_ending(self, **_: object) -> None: ...
    def tft_on_order(self, **_: object) -> None: ...


def wrap(model: Small, scene: Scene, place: Tracer) -> nn.Module:
    """
    Wrap the model in a DDP that records the start of every collective, if there are peers.
    """
    if scene.world == 1:
        return model

    dist.init_process_group(
        "gloo",
        init_method=f"file://{scene.run_dir}/meeting",
        rank=scene.rank,
        world_size=scene.world,
    )
    world = dist.group.WORLD
    assert world is not None

    def launched(
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # the name is not in `__all__`
    ) -> torch.futures.Future[Tensor]:
        place("collective launched")
        return default_hooks.allreduce_hook(world, bucket)

    wrapped = DDP(model)
    wrapped.register_comm_hook(None, launched)
    return wrapped


def parameter_groups(
    model: nn.Module, groups: int
) -> list[dict[str, Any]]:  # Any: torch's own type
    """
    Return two parameter groups, matrices and vectors, or one.
    """
    parameters = list(model.parameters())
    if groups == 1:
        return [{"params": parameters}]
    return [{"params": [p for p in parameters if p.dim() == d]} for d in (2, 1)]


def share_memory(model: nn.Module, path: Path) -> Tensor:
    """
    Move the parameters into a file without changing their values.
    """
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    memory = torch.from_file(str(path), shared=True, size=size, dtype=parameters[0].dtype)
    offset = 0
    for parameter in parameters:
        home = memory[offset : offset + parameter.numel()].view_as(parameter)
        home.copy_(parameter.detach())
        parameter.data = home
        offset += parameter.numel()
    return memory


def batch(view: View, model: Small) -> Tensor:
    """
    Return the batch of a step. Ranks that train together have different ones.
    """
    own = 0.05 * view.rank if view.world > 1 else 0.0
    return torch.full((2, 4), 0.1 * view.step + own, dtype=model.dtype)


def make_optimizer(model: nn.Module, scene: Scene) -> torch.optim.Optimizer:
    """
    Return an AdamW, or one with masters: for two ranks that hold the same shard, so that it needs
    no process group.
    """
    if scene.masters:
        return ReplicaOptimizer(model.parameters(), torch.optim.AdamW, rank=0, world=2, copies=2)
    return torch.optim.AdamW(parameter_groups(model, scene.groups))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, bytes]]:
    """
    Return all buffers and parameters, and all that the optimizer keeps for them, by kind and name:
    the size of an element, and the content.
    """
    found: dict[str, Tensor] = {f"buffer {name}": each for name, each in model.named_buffers()}
    for name, parameter in model.named_parameters():
        key: Tensor = parameter
        found[f"param {name}"] = key
        if isinstance(optimizer, ReplicaOptimizer):
            found[f"master {name}"] = key = optimizer.kept_for(parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind} {name}"] = optimizer.state[key][kind]
    return {name: (each.element_size(), content(each)) for name, each in found.items()}


def content(tensor: Tensor) -> bytes:
    """
    Return the bytes of a tensor.
    """
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def gradients(model: nn.Module) -> str:
    """
    Return the gradients of all parameters, by name.
    """
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return json.dumps({name: content(gradient).hex() for name, gradient in found.items()})


def flipped(before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]]) -> str:
    """
    Return the elements and the bits that differ, by tensor. Tensors that are equal are left out.
    """
    found = {name: bits_of(size, old, after[name][1]) for name, (size, old) in before.items()}
    return json.dumps({name: bits for name, bits in found.items() if bits})


def bits_of(size: int, old: bytes, new: bytes) -> list[tuple[int, int]]:
    """
    Return the elements and the bits in which two contents differ, for elements of `size` bytes.
    """
    differ = int.from_bytes(old, "little") ^ int.from_bytes(new, "little")
    return [divmod(bit, 8 * size) for bit in range(8 * len(old)) if differ >> bit & 1]


def tick(scene: Scene) -> None:
    """
    Count in a file on a second Python thread, as long as the interpreter lets it run.
    """
    path = scene.file("ticks")
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 16)
    never = threading.Event()

    def count() -> None:
        number = 0
        while not never.wait(0.001):
            number += 1
            struct.pack_into("qq", memory, 0, threading.get_native_id(), number)

    threading.Thread(target=count, daemon=True).start()
