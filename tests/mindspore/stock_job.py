"""
A script that trains with `Model.train` and MindSpore's own callback `TrainFaultTolerance`.

The script runs over `mindio_ttp`; `test_route_a.py` and `test_msrun_stock.py` run the script.

    stock_job.py DIRECTORY RING STEPS FAULTS

The script writes the losses, the way each loop was left, and the final state into DIRECTORY. FAULTS
is JSON, a list of [rank, step, where, text]; each fault happens once:

- `where` is `loop` (before the all-reduce of the gradients) or `update` (after the state has
  changed).
- The text `leaving` is no failure: the rank stays in its update until it has the order to leave its
  loop after the step.
- With the text `killed`, the rank waits until the test kills it. Any other text is raised.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

if os.environ.get("MS_ROLE") == "MS_SCHED":
    # msrun's scheduler is needed only for MindSpore's own groups, which this job does not use
    sys.exit()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# msrun sets these for its workers, and MindSpore reads them
os.environ.update(MS_NODE_ID=str(rank), MS_WORKER_NUM=str(world))
os.environ.update(RANK_ID=str(rank), RANK_SIZE=str(world))

import mindspore  # noqa: E402 (MindSpore reads the environment when it is imported)
import numpy  # noqa: E402
from mindio_ttp.processor import processor  # noqa: E402
from mindspore import nn, train  # noqa: E402
from mindspore.dataset import NumpySlicesDataset  # noqa: E402
from mindspore.utils import _tft_handler  # noqa: E402

from tests.e2e.jobs import until  # noqa: E402
from tests.mindio.ring import Member  # noqa: E402
from tests.mindspore import shim  # noqa: E402

directory, ring, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
faults: list[list[Any]] = json.loads(sys.argv[4])  # Any: JSON
INPUTS, OUTPUTS, ROWS = 3, 2, 4


def note(what: str, **facts: Any) -> None:
    """
    Append an event to this rank's file of calls.
    """
    with (directory / f"calls-rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, **facts}) + "\n")


class Link:
    """
    The connection between the ranks: an all-reduce through `Ring`, and named pipes for state.
    """

    def __init__(self) -> None:
        self._member: Member | None = None
        self._stopped = False

    def stop(self) -> None:
        """
        Interrupt the all-reduce that this rank waits in.
        """
        note("stop")
        self._stopped = True
        if self._member is not None:
            self._member.shut()

    def resume(self) -> None:
        """
        Allow collectives again, over a new connection.
        """
        note("resume")
        self._member, self._stopped = None, False

    def mean(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """
        Return the mean of the gradients over all ranks, added in the order of the ranks.
        """
        try:
            return tuple(self._mean(each) for each in gradients)
        except ConnectionError as error:
            raise RuntimeError(f"ForceStopError: {error}") from error

    def _mean(self, gradient: Any) -> Any:
        if self._member is None:
            self._member = Member(rank, ring)
            if self._stopped:
                raise ConnectionError("there is nobody to wait for")
            self._member.join()
        array = gradient.asnumpy()
        sums = [self._member.add(float(number)) / world for number in array.ravel()]
        return mindspore.Tensor(numpy.array(sums, array.dtype).reshape(array.shape))

    def send_recv(self, parameters: list[Any], source: int, target: int) -> int:
        """
        Send or receive parameters through a named pipe between the two ranks; return 0.
        """
        training = threading.current_thread() is threading.main_thread()
        names = [parameter.name for parameter in parameters]
        note("send_recv", source=source, target=target, training=training, names=names)
        pipe = directory / f"pipe-{source}-{target}"
        with suppress(FileExistsError):
            os.mkfifo(pipe)
        if rank == source:
            with pipe.open("wb") as file:
                for parameter in parameters:
                    file.write(parameter.asnumpy().tobytes())
            return 0
        with pipe.open("rb") as file:
            for parameter in parameters:
                held = parameter.asnumpy()
                got = numpy.frombuffer(file.read(held.nbytes), held.dtype).reshape(held.shape)
                parameter.copy_(mindspore.Tensor(got.copy()))
        return 0


link = Link()


class At:
    """
    The step at which this rank is.
    """

    step = 0


def closed(incidents: int) -> bool:
    """
    Return whether the job has closed at least this number of incidents.
    """
    log = (directory / "logs" / "controller.log").read_text()
    return log.count("event=incident_closed") >= incidents


def is_to_leave() -> bool:
    """
    Return whether the step gate has told this rank to leave its loop after the current step.

    The test reads tft's internal state, because no interface tells this to a program.
    """
    return processor.session._gate.leaves(At.step)


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
        if text == "leaving":
            until(is_to_leave, "the word to leave the loop")
            return
        if text == "killed":
            while True:
                signal.pause()
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if "UCE" in text:
            for parameter in step_cell.get_parameters():
                parameter.copy_(mindspore.Tensor(parameter.asnumpy() * 0 + 9))
        raise RuntimeError(text)


class Struck(nn.Adam):  # type: ignore[misc]  # MindSpore ships no types
    """
    An optimizer in which a fault can happen after the state has changed.
    """

    def __call__(self, gradients: Any) -> Any:  # Any: Tensors of MindSpore
        done = super().__call__(gradients)
        strike("update")
        return done


class Step(nn.Cell):  # type: ignore[misc]  # as above
    """
    One step of training: forward, backward, all-reduce and update.
    """

    def __init__(self, network: Any, optimizer: Any) -> None:  # Any: Cells of MindSpore
        super().__init__()
        self.network, self.optimizer = network, optimizer
        self.error = nn.MSELoss()
        self.gradients_of = mindspore.value_and_grad(self.forward, None, optimizer.parameters)

    def forward(self, x: Any, y: Any) -> Any:  # Any: Tensors of MindSpore
        """
        Return the loss.
        """
        return self.error(self.network(x), y)

    def construct(self, x: Any, y: Any) -> Any:  # Any: Tensors of MindSpore
        """
        Train one step and return its loss. MindSpore calls this.
        """
        shim.started()
        loss, gradients = self.gradients_of(x, y)
        strike("loop")
        self.optimizer(link.mean(gradients))
        return loss


def state() -> dict[str, str]:
    """
    Return all trained parameters as hexadecimal text.

    The mark of an update is left out, because MindSpore's callback sets it anew.
    """
    return {
        parameter.name: parameter.asnumpy().tobytes().hex()
        for parameter in step_cell.get_parameters()
        if "tft_g_one_flag" not in parameter.name
    }


class Told(train.Callback):  # type: ignore[misc]  # as above
    """
    A callback that records the losses.
    """

    def on_train_step_begin(self, run_context: train.RunContext) -> None:
        """
        Note the number of the step. MindSpore calls this before each step.
        """
        At.step = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: train.RunContext) -> None:
        """
        Record the loss and the state. MindSpore calls this after each step.
        """
        loss = run_context.original_args().net_outputs.asnumpy().tobytes().hex()
        with (directory / f"steps-rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": At.step, "loss": loss, "state": state()}) + "\n")


mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
mindspore.set_auto_parallel_context(parallel_mode="data_parallel")
mindspore.set_seed(5)
draw = numpy.random.RandomState(7)
rows = draw.randn(world * steps * ROWS, INPUTS).astype(numpy.float32)
wanted = numpy.tanh(rows @ draw.randn(INPUTS, OUTPUTS).astype(numpy.float32))
data = NumpySlicesDataset(
    {"x": rows, "y": wanted}, shuffle=True, num_shards=world, shard_id=rank
).batch(ROWS, drop_remainder=True)  # fmt: skip
begin = mindspore.Tensor(draw.randn(OUTPUTS, INPUTS).astype(numpy.float32))
network = nn.Dense(INPUTS, OUTPUTS, weight_init=begin, bias_init="zeros")

shim.install(link)
if "ARF:1" in os.environ["MS_ENABLE_TFT"]:
    _tft_handler.init(config=None)
step_cell = Step(network, shim.optimizer(Struck, network.trainable_params(), 0.01))
callback = train.TrainFaultTolerance(str(directory / "last"))
model = train.Model(step_cell)
model.train(1, data, callbacks=[Told(), callback], dataset_sink_mode=False)
(directory / f"final-rank{rank}.json").write_text(json.dumps(state()))
