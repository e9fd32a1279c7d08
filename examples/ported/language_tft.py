"""
`language.py` with tft: `tft run --nproc-per-node 2 language_tft.py`.

The batches have a position, the batch that is read ahead is not counted before it is used, the
GradScaler is handed over, and what stood behind the optimizer's step is called by the session.
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Decoder, arguments, corpus, sequences
from tft_pytorch import Prefetcher
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

args = arguments(steps=30)
ACCUMULATION = 2

session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(1337)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
rank, world = session.rank, session.world
torch.manual_seed(1337 + rank)


class Sequences:
    """
    Random sequences of the training split. The position is the state of the generator.
    """

    def __init__(self) -> None:
        self._tokens, self._generator = corpus("train"), torch.Generator().manual_seed(100 + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """
        Return the next batch.
        """
        return sequences(self._tokens, 4, self._generator)

    def state_dict(self) -> dict[str, Any]:
        """
        Return the position.
        """
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go to a position.
        """
        self._generator.set_state(state["generator"])

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        for _ in range(batches):
            self.next()


batches = Prefetcher(Sequences())


def rate(step: int) -> float:
    """
    Return the learning rate of a step: a warm-up, then half a cosine.
    """
    if step < 5:
        return 1e-3 * step / 5
    return 5e-4 * (1.0 + math.cos(math.pi * step / args.steps))


def evaluate(step: int) -> None:
    """
    Record the mean loss of some batches of the validation split over all ranks.
    """
    model.eval()
    own = torch.Generator().manual_seed(step + rank)
    with torch.no_grad():
        loss = sum(model(*sequences(corpus("val"), 4, own)) for _ in range(4)) / 4
    dist.all_reduce(loss)
    if rank == 0:
        session.record({"val": loss.item() / world})


def save(step: int) -> None:
    """
    Write the state to a file. Rank 0 does it. The file of a step is the same if it is written again.
    """
    if args.out and rank == 0:
        path = Path(args.out, f"state-{step}.pt")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new"
        )
        os.replace(f"{path}.new", path)


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    wrapped = session.model
    for step in session.steps(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for micro in range(ACCUMULATION):
            x, y = batches.next()
            with nullcontext() if micro == ACCUMULATION - 1 else wrapped.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = wrapped(x, y) / ACCUMULATION
                batches.ahead()
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)


session.adopt(
    model=model,
    optimizer=optimizer,
    data=batches,
    others={"scaler": scaler},
    wrap=lambda: DDP(model),
)
session.evaluate(evaluate, every=10)
session.after_step(save, every=10)
session.run(train)
if args.out:
    torch.save(model.state_dict(), Path(args.out, f"final-{rank}.pt"))
