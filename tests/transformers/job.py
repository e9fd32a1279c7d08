"""
Trains a small language model with a `Trainer`, and records what it did. Usage: `job.py --out DIR
[options]`.

With `--plain` it is an ordinary script for torchrun. Without it, it is a job of tft. With `--device`,
the ranks share one GPU. With `--lagging`, collectives are those of the test device.
"""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from sys import path
from typing import Any

import numpy
import torch
from accelerate import DistributedDataParallelKwargs
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

path += ["."]
from tests.accelerator.sharing import share_device
from tests.device.group import install
from tests.once import once
from tests.transformers.specials import SPECIALS

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--items", type=int, default=40)
parser.add_argument("--set", nargs="*", default=[], help="NAME=JSON: arguments of the training")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--random", action="store_true", help="items draw random numbers")
parser.add_argument("--scaler", action="store_true", help="a GradScaler that overflows at first")
parser.add_argument("--patience", type=int, default=0)
parser.add_argument(
    "--fails", type=int, default=0, help="a callback raises at the end of this step"
)
parser.add_argument("--dies", default="", help="RANK:PLACE:STEP, a place of the recording callback")
parser.add_argument("--checkpoint", default="", help="a checkpoint of the Trainer to resume from")
parser.add_argument("--special", default="", choices=SPECIALS, help="a Trainer of `specials.py`")
parser.add_argument("--device", action="store_true")
parser.add_argument("--lagging", action="store_true")
options = parser.parse_args()
if options.device:
    share_device()
if options.lagging:
    install()
options.out.mkdir(parents=True, exist_ok=True)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """
    Sequences of tokens, each made from its number.
    """

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._seed = number, seed

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 10_000 + index)
        tokens = torch.randint(64, (16,), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100
        if options.random and self._seed == 1:
            labels[int(torch.randint(8, 16, ()))] = -100
            labels[int(numpy.random.randint(8, 16))] = -100
        return {"input_ids": tokens, "labels": labels}


class Recorder(TrainerCallback):  # type: ignore[misc]  # Transformers ships no types
    """
    Writes a row for each step and each log, and kills its process on demand.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._victim, self._place, self._step = (*options.dies.split(":"), "", "", "")[:3]

    def _write(self, name: str, row: dict[str, Any]) -> None:
        with (options.out / f"{name}-rank{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def reached(self, place: str, step: int) -> None:
        """
        Kill this process if the options name its rank, this place and this step.
        """
        mark = options.out / f"died-{place}-{step}"
        here = (str(self._rank), place, str(step))
        if here == (self._victim, self._place, self._step) and once(mark):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.reached("step_begin", state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.reached("substep_end", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._write("steps", {"step": state.global_step, "epoch": state.epoch})
        self.reached("step_end", state.global_step)
        if state.global_step == options.fails:
            raise ValueError("a callback of the user has failed")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **named: Any) -> None:
        self._write("logs", {"step": state.global_step, **logs})
        self.reached("log", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.reached("prediction_step", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._write("evaluations", {"step": state.global_step})
        self.reached("evaluate", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._write("saves", {"step": state.global_step})
        self.reached("save", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._write("epochs", {"epoch": state.epoch})
        self.reached("epoch_end", state.global_step)


Chosen: Any = SPECIALS[options.special]


class Recording(Chosen):  # type: ignore[misc]  # as above
    """
    Records each loss of training.
    """

    recorder: Recorder

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        self.recorder.reached("batches", self.state.global_step + 1)
        return super().get_batch_samples(*arguments, **named)

    def prediction_step(self, *arguments: Any, **named: Any) -> Any:
        self.recorder.reached("prediction", self.state.global_step)
        return super().prediction_step(*arguments, **named)

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, **named)
        if model.training:
            found = (loss[0] if isinstance(loss, tuple) else loss).item()
            row = {
                "step": self.state.global_step + 1,
                "loss": found.hex(),
                "n": len(inputs["labels"]),
            }
            name = f"losses-rank{self.args.process_index}.jsonl"
            with (options.out / name).open("a") as file:
                file.write(json.dumps(row) + "\n")
        return loss


def digest(state: Any) -> str:
    """
    Return a digest of nested containers of tensors and plain values.
    """
    sum_ = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            sum_.update(bits.numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                sum_.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            sum_.update(repr(value).encode())

    add(state)
    return sum_.hexdigest()


def train() -> None:
    """
    Train, and write what is there at the end.
    """
    if not options.plain:
        import tft_transformers

        tft_transformers.init()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, attention_dropout=options.dropout,
        attn_implementation="eager" if options.device else None,
    )  # fmt: skip
    chosen = {name: json.loads(value) for name, _, value in (s.partition("=") for s in options.set)}
    defaults = {
        "per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 2,
        "save_strategy": "no", "report_to": "none", "use_cpu": not options.device, "learning_rate": 1e-2,
        "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(options.out / "output"), **{**defaults, **chosen})
    recorder = Recorder(args.process_index)
    callbacks: list[Any] = [recorder]
    if options.patience:
        callbacks.append(EarlyStoppingCallback(options.patience))
    trainer = Recording(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Tokens(options.items, 1),
        eval_dataset=Tokens(9, 2),
        callbacks=callbacks,
    )
    trainer.recorder = recorder
    if options.lagging:
        # then gradients are complete when the device has carried out the all-reduces
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        trainer.accelerator.ddp_handler = views
    if options.scaler:
        trainer.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**126, backoff_factor=2.0**-60, growth_interval=4
        )
    if not options.plain:
        trainer = tft_transformers.prepare(trainer)
    result = trainer.train(resume_from_checkpoint=options.checkpoint or None)
    final = {
        "parameters": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "torch": digest(torch.get_rng_state()),
        "device": digest(torch.cuda.get_rng_state() if options.device else ()),
        "log": trainer.state.log_history,
        "step": result.global_step,
        "training_loss": result.training_loss,
        "flos": trainer.state.total_flos,
    }
    path = options.out / f"final-rank{args.process_index}.json"
    path.write_text(json.dumps(final))


train()
