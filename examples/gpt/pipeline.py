"""
The small GPT cut into two stages of a pipeline, each on half of the ranks:
`tft run --nproc-per-node 4 pipeline.py`.

`make` makes the objects that need process groups: at the start, and again after every incident.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, TOKENS, make_optimizer, make_scheduler
from record import Record
from tft_pytorch import Made
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import tft

STAGES = 2
"""The number of ranks that share one model."""

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

session = tft.init()
rank, copies = session.rank, session.world // STAGES
pipeline, place = divmod(rank, STAGES)
last = place == STAGES - 1
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=pipeline)
record = Record(session.run_dir, rank)


class Stage(nn.Module):
    """
    The stage of this rank. Its parts have the same names as in the whole model.
    """

    def __init__(self, whole: GPT) -> None:
        super().__init__()
        if place == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
            self.dropout = whole.dropout
        share = -(-size.layers // STAGES)
        blocks = list(whole.blocks.named_children())[place * share : (place + 1) * share]
        self.blocks = nn.ModuleDict(dict(blocks))
        if last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """
        Compute this stage. The first stage takes token numbers; the last stage returns logits.
        """
        if place == 0:
            x = self.dropout(self.tokens(x) + self.positions(torch.arange(x.shape[1])))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if last else x


def make() -> Made:
    mesh = init_device_mesh("cpu", (copies, STAGES), mesh_dim_names=("replicate", "stage"))
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = DDP(Stage(GPT(size)), process_group=mesh["replicate"].get_group())
    optimizer = make_optimizer(model)
    # Without the shapes of the inputs and outputs, torch tries the stage out and draws from
    # dropout. One sequence is one microbatch.
    tokens = torch.zeros(1, size.context, dtype=torch.long)
    between = torch.zeros(1, size.context, size.width, requires_grad=True)
    logits = torch.zeros(1, size.context, TOKENS, requires_grad=True)
    stage = PipelineStage(
        model, place, STAGES, torch.device("cpu"),
        input_args=tokens if place == 0 else between, output_args=logits if last else between,
        group=mesh["stage"].get_group(),
    )  # fmt: skip
    schedule = ScheduleGPipe(stage, n_microbatches=size.batch, loss_fn=loss_of)
    scheduler = make_scheduler(optimizer, args.steps)
    return Made(model=model, optimizer=optimizer, scheduler=scheduler, more=(mesh, schedule))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1000 * args.seed + rank)  # but its own dropout on each
session.adopt(make=make, data=data)


def train(session: tft.Session) -> None:
    made = session.model
    mesh, schedule = made.more
    parameters = list(made.model.parameters())
    for step in session.steps(args.steps):
        inputs, targets = data.next()
        losses: list[Tensor] = []
        schedule.step(*((inputs,) if place == 0 else ()), target=targets, losses=losses)
        # All stages need the loss, which only the last one has, and the squared norm of all
        # gradients.
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        loss = torch.stack(losses).mean() if last else torch.zeros(())
        sums = torch.stack([loss.detach(), norm.square()])
        dist.all_reduce(sums, group=mesh["stage"].get_group())
        record.write(step, sums[0].item())
        clip_grads_with_norm_(parameters, 1.0, sums[1].sqrt())
        with session.update():
            made.optimizer.step()
            made.scheduler.step()
        made.optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {sums[0].item():.3f}")


session.run(train)
record.finish(session.digests())
