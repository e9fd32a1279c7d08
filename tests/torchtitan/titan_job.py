"""
The example `examples/torchtitan` with a record of its metrics, with tft or without it:
`titan_job.py DIR [--plain] [--steps N] [--saves N] [--accumulates] [--random] [--die-saving RANK,STEP] …`.

With `--die-saving`, the first process of that rank kills itself in the middle of TorchTitan's
checkpoint of that step.
"""

import argparse
import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from sys import path
from typing import Any

path += ["examples/torchtitan"]
import cpu  # noqa: F401 (before TorchTitan)
import numpy
import torch
import torch.distributed as dist
from small import MadeUpTokens, small_llama
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed.activation_checkpoint import SelectiveAC

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--saves", type=int, default=3)
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--accumulates", action="store_true")
parser.add_argument("--tensorboard", action="store_true")
parser.add_argument("--die-saving", default="")
parser.add_argument("--infinite-loss", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--recomputes", action="store_true")
parser.add_argument("--random", action="store_true", help="items of training draw numbers")
args = parser.parse_args()


class Recorder(MetricsProcessor):  # type: ignore[misc]  # the wheel has no types
    """
    Also writes the metrics to a file of this rank, without rounding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, step: int, *numbers: float, extra_metrics: Any = None) -> None:
        """
        Log the metrics of a step.
        """
        assert self.optimizers is not None
        row = [*map(float, numbers), *map(float, extra_metrics.values())]
        write({"step": step, "metrics": [each.hex() for each in row]})
        super().log(step, *numbers, extra_metrics=extra_metrics)

    def log_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        """
        Log the result of a validation.
        """
        write({"step": step, "validation": float(loss).hex()})
        super().log_validation(loss, step, extra_metrics)


def write(row: dict[str, Any]) -> None:
    """
    Append a row to the file of this rank.
    """
    with (args.out / f"metrics-rank{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def die_saving(rank: int, step: int) -> None:
    """
    Let the first process of `rank` kill itself when it writes its part of the checkpoint of `step`.
    """
    write_data = FileSystemWriter.write_data

    def dying(self: Any, *args_: Any, **how: Any) -> Any:
        mark = args.out / "died-saving"
        if dist.get_rank() == rank and self.path.name == f"step-{step}" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write_data(self, *args_, **how)

    FileSystemWriter.write_data = dying  # type: ignore[method-assign]


def draw_items() -> None:
    """
    Let the items of training draw tokens from the generators of the process.
    """
    random.seed(5)
    numpy.random.seed(5)
    body = MadeUpTokens.__iter__

    def drawing(self: Any) -> Any:
        for inputs, labels in body(self):
            if torch.is_grad_enabled():
                inputs["input"][0] = random.randrange(2048)
                inputs["input"][1] = int(numpy.random.randint(2048))
            yield inputs, labels

    MadeUpTokens.__iter__ = drawing


def settings() -> Any:
    """
    Return the settings of the training.
    """
    config = small_llama()
    config.dump_folder = str(args.out)
    config.metrics = Recorder.Config(log_freq=1, enable_tensorboard=args.tensorboard)
    config.training.steps = args.steps
    config.lr_scheduler.total_steps = 20
    config.checkpoint.enable, config.checkpoint.interval = args.saves > 0, max(args.saves, 1)
    config.validator.enable, config.validator.freq = True, 4
    config.dataloader.num_workers = args.workers
    config.parallelism.data_parallel_replicate_degree = args.replicas
    config.parallelism.tensor_parallel_degree = args.tensor
    if args.recomputes:
        config.activation_checkpoint = SelectiveAC.Config()
    if args.accumulates:
        config.training.global_batch_size = 16
    return config


def main() -> None:
    """
    Train.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    if args.die_saving:
        die_saving(*map(int, args.die_saving.split(",")))
    if args.random:
        draw_items()
    config = settings()
    if args.infinite_loss:
        from torchtitan.trainer import Trainer

        body = Trainer.forward_backward_step

        def infinite(self: Any, **how: Any) -> Any:
            loss = body(self, **how)
            return loss * float("inf") if self.step >= args.infinite_loss else loss

        Trainer.forward_backward_step = infinite
    if args.plain:
        trainer = config.build()
        trainer.train()
        trainer.close()
        dist.destroy_process_group()
        return
    import tft_torchtitan

    session = tft_torchtitan.train(config)
    final = args.out / f"final-rank{session.rank}.json"
    final.write_text(json.dumps(dict(session.digests())))


main()
