"""
A script that trains with `Model.train` and has no loop of its own. `test_model.py` runs the script.

    model_job.py DIRECTORY EPOCHS OPTIONS

The script writes the loss of every step, bit for bit, and the final state into DIRECTORY. OPTIONS
is JSON:

- `faults`: a list of [rank, step, where, text]; each fault happens once. `where` is `forward`,
  `update` (after half of the state has changed) or `end` (after a step). The text is raised, except
  `kill` and `terminate`, which signal the process.
- `wrong`: [rank, step, factor, always]; the output of the rank is multiplied by `factor` in this
  step, the first time or always.
- `callback`: the arguments of the callback.
- `resume`: continue from the last checkpoint in the layout of MindSpore Transformers.
- `recipe`: a file of MindSpore Transformers that says which ranks hold the same part of the
  network.
- `plain`: leave out the part that marks updates.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mindspore
import numpy
from mindspore import nn, train
from mindspore.dataset import NumpySlicesDataset
from tft_mindspore import TrainFaultTolerance
from tft_mindspore.layout import find
from tft_mindspore.mindformers import read_recipe

from tests.e2e.jobs import until

directory, epochs = Path(sys.argv[1]), int(sys.argv[2])
options: dict[str, Any] = json.loads(sys.argv[3])  # Any: JSON
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
faults: list[list[Any]] = options.get("faults", [])
batches: int = options.get("batches", 4)
groups = [tuple(range(world))]
if "recipe" in options:
    groups = list(read_recipe(Path(options["recipe"])).sizes.replicas())
parts = len(groups)
part, own = next((place, group) for place, group in enumerate(groups) if rank in group)
INPUTS, OUTPUTS, ROWS = 12, 8, 4


class At:
    """
    The step at which this rank is.
    """

    step = 0
    """The number of the step that is computed now."""


def closed(incidents: int) -> bool:
    """
    Return whether the job has closed at least this number of incidents.
    """
    log = (directory / "logs" / "controller.log").read_text()
    return log.count("event=incident_closed") >= incidents


def strike(where: str) -> None:
    """
    Carry out the fault that `faults` plans for this rank, step and place, if any.
    """
    for place, (whom, step, at, text) in enumerate(faults):
        mark = directory / f"struck-{place}"
        if (whom, step, at) != (rank, At.step, where) or mark.exists():
            continue
        before = len({earlier[1] for earlier in faults[:place]} - {step})
        until(partial(closed, before), "the end of what was struck before")
        mark.touch()
        if text in ("kill", "terminate"):
            os.kill(os.getpid(), signal.SIGKILL if text == "kill" else signal.SIGTERM)
        raise RuntimeError(text)


def wrong() -> float:
    """
    Return the factor by which this rank's output is too large in this step, as `wrong` says: once,
    or always. Else 1.
    """
    whom, step, factor, always = options.get("wrong", [-1, 0, 1.0, False])
    mark = directory / "was-wrong"
    if (whom, step) != (rank, At.step) or (mark.exists() and not always):
        return 1.0
    mark.touch()
    return float(factor)


class Network(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
    """
    A dense layer, or this rank's part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        random = numpy.random.RandomState(3)
        wide = OUTPUTS // parts
        begin = random.randn(OUTPUTS, INPUTS).astype(numpy.float32)
        mine = mindspore.Tensor(begin[part * wide : (part + 1) * wide])
        self.first = nn.Dense(INPUTS, wide, weight_init=mine, bias_init="zeros")

    def construct(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """
        Compute the output. MindSpore calls this in the forward pass.
        """
        strike("forward")
        return nn.Tanh()(self.first(x)) * wrong()


class Adam(nn.Adam):  # type: ignore[misc]  # as above
    """
    An optimizer in which a fault can happen during the update.
    """

    def __call__(self, gradients: Any) -> Any:  # Any: Tensors of MindSpore
        done = super().__call__(gradients)
        strike("update")
        return done


class Told(train.Callback):  # type: ignore[misc]  # as above
    """
    A callback that records the losses.
    """

    def on_train_step_begin(self, run_context: train.RunContext) -> None:
        """
        Note the number of the step. MindSpore calls this before each step.
        """
        At.step = run_context.original_args().cur_step_num + callback.initial_step

    def on_train_step_end(self, run_context: train.RunContext) -> None:
        """
        Record the loss of the step. MindSpore calls this after each step.
        """
        told = run_context.original_args()
        loss = told.net_outputs.asnumpy().tobytes().hex()
        row = {"step": At.step, "epoch": told.cur_epoch_num, "loss": loss}
        with (directory / f"steps-rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        strike("end")


class Epochs(train.Callback):  # type: ignore[misc]  # as above
    """
    A callback that notes the epochs that it has seen since training began, as EarlyStopping does.
    """

    def on_train_begin(self, run_context: train.RunContext) -> None:
        """
        Begin anew. MindSpore calls this when it enters its loop, and again after an incident.
        """
        self.seen: list[int] = []

    def on_train_epoch_end(self, run_context: train.RunContext) -> None:
        """
        Note the epoch. MindSpore calls this after the last step of each epoch.
        """
        self.seen.append(run_context.original_args().cur_epoch_num)


mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
mindspore.set_seed(5)
draw = numpy.random.RandomState(7)
count = world // parts * batches * ROWS
x = draw.randn(count, INPUTS).astype(numpy.float32)
y = numpy.tanh(x @ draw.randn(INPUTS, OUTPUTS).astype(numpy.float32))
wide = OUTPUTS // parts
slices = {"x": x, "y": y[:, part * wide : (part + 1) * wide].copy()}
data = NumpySlicesDataset(
    slices, shuffle=True, num_shards=len(own), shard_id=own.index(rank)
).batch(ROWS, drop_remainder=True)  # fmt: skip

network = Network()
made = Adam if options.get("plain") else TrainFaultTolerance.get_optimizer_wrapper(Adam)
optimizer = made(network.trainable_params(), 0.01)
told: dict[str, Any] = dict(options.get("callback", {}))
begun = 0
if options.get("resume"):
    found = find(Path(told["ckpt_save_path"]), groups, high_availability=True)
    loaded = mindspore.load_checkpoint(str(found.files[rank]))
    for holder in (network, optimizer):
        missing, _ = mindspore.load_param_into_net(holder, loaded)
        assert not missing, missing
    begun = (found.epoch - 1) * batches + found.step
    data.set_init_step(begun)
callback = TrainFaultTolerance(
    initial_step=begun, ranks=own if parts > 1 else None,
    **{"ckpt_save_path": str(directory / "last"), **told},
)  # fmt: skip
seen = Epochs()
model = train.Model(network, loss_fn=nn.MSELoss(), optimizer=optimizer)
model.train(
    epochs, data, callbacks=[Told(), callback, seen], dataset_sink_mode=False,
    initial_epoch=begun // batches,
)  # fmt: skip
state = {
    parameter.name: parameter.asnumpy().tobytes().hex()
    for holder in (network, optimizer)
    for parameter in holder.get_parameters()
}
(directory / f"final-rank{rank}.json").write_text(json.dumps(state))
(directory / f"epochs-rank{rank}.json").write_text(json.dumps(seen.seen))
