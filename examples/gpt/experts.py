"""
The small GPT with experts in place of its perceptrons: `tft run --nproc-per-node 4 experts.py`.

With four ranks, ranks 0 and 2 have the even experts, and ranks 1 and 3 the odd ones. Every rank has
all other parts of the model.

`make` makes the objects that need process groups: at the start, and again after every incident.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from mixture import Mixture
from record import Record
from tft_pytorch import Made
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--experts", type=int, default=2, help="of each layer")
parser.add_argument("--spread", type=int, default=2, help="how many ranks share all experts")
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

session = tft.init()
rank, copies = session.rank, session.world // args.spread
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=rank)
record = Record(session.run_dir, rank)


def make() -> Made:
    mesh = init_device_mesh("cpu", (copies, args.spread), mesh_dim_names=("replicate", "expert"))
    over, alike = mesh["expert"].get_group(), mesh["replicate"].get_group()
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(size)
    for block in model.blocks:
        every = {str(n): perceptron() for n in range(args.experts)}
        mixture = Mixture(size.width, every, over)
        mixture.experts = DDP(mixture.experts, process_group=alike)
        block.perceptron = mixture
    apart = [name for name, _ in model.named_parameters() if ".experts." in name]
    DDP._set_params_and_buffers_to_ignore_for_model(model, apart)  # type: ignore[no-untyped-call]  # torch
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, args.steps)
    return Made(model=DDP(model), optimizer=optimizer, scheduler=scheduler, more=over)


def perceptron() -> nn.Module:
    width = size.width
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def clip(model: nn.Module, most: float, over: dist.ProcessGroup) -> None:
    """
    Clip the gradients by the norm of the whole model.

    The squared norm of the experts is all-reduced over the ranks that share all experts.
    """
    named = list(model.named_parameters())
    own = [p.grad for name, p in named if ".experts." in name and p.grad is not None]
    rest = [p.grad for name, p in named if ".experts." not in name and p.grad is not None]
    total: Tensor = get_total_norm(own).square()
    dist.all_reduce(total, group=over)
    norm = (total + get_total_norm(rest).square()).sqrt()
    clip_grads_with_norm_([p for _, p in named], most, norm)


torch.manual_seed(1000 * args.seed + rank)  # but its own dropout on each
session.adopt(make=make, data=data)
print(session.topology())


def train(session: tft.Session) -> None:
    made: Any = session.model
    for step in session.steps(args.steps):
        loss = made.model(*data.next())
        record.write(step, loss.item())
        loss.backward()
        clip(made.model, 1.0, made.more)
        with session.update():
            made.optimizer.step()
            made.scheduler.step()
        made.optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")


session.run(train)
record.finish(session.digests())
