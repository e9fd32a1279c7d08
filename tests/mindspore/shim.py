"""
Stand-ins for Ascend functions, so that MindSpore's own callback runs on a CPU.

The callback is used as installed. The comment on each stand-in names the part that it replaces. The
test provides `link`, the connection between ranks.
"""

from types import SimpleNamespace
from typing import Any

import mindspore
from mindio_ttp.framework_ttp import tft_start_updating_os
from mindio_ttp.processor import processor
from mindspore import nn
from mindspore.train.callback import _train_fault_tolerance as stock
from mindspore.utils import utils


def get_context(key: str) -> Any:  # in place of mindspore.context's, in two files: the device
    return "Ascend" if key == "device_target" else mindspore.get_context(key)


class Twice(nn.Cell):  # type: ignore[misc]  # in place of AllReduce by two, and of TensorReport
    def construct(self, *given: Any) -> Any:
        return given[-1] + given[-1]


def install(link: Any) -> None:
    asked = mindspore.get_auto_parallel_context
    context = SimpleNamespace(get_context=get_context, get_auto_parallel_context=asked)
    hccl = SimpleNamespace(resume_hccl_comm=link.resume)
    stock.context = utils.context = context  # in place of the checks for Ascend
    stock._stop_device = lambda device: link.stop()  # in place of aborting what the device runs
    stock._repair_device = lambda device: None  # in place of mapping lost memory anew
    stock._get_uce_mem_info = lambda device: None  # in place of asking for the addresses lost
    stock._get_uce_process_strategy = lambda: "RS_UCE_HIGHLEVEL"  # in place of whose they are
    stock.clean_tdt_channel = lambda: None  # in place of emptying a data sink: there is none
    stock.reset_params = len  # in place of zeros in accumulated gradients: of none, which says 0
    stock.send_recv = link.send_recv  # in place of HCCL from one rank to another
    stock._rebuild_group = link.resume  # in place of HCCL's groups with a new process in them
    stock.CollectiveManager = SimpleNamespace(get_instance=lambda: hccl)  # in place of HCCL's


def started() -> None:  # in place of the runtime, where a new process first runs something
    if processor.session.incarnation > 0 and not processor.begun:
        raise RuntimeError("ARF FINISH")


def optimizer(origin: type, *given: Any) -> Any:
    kind = stock.TrainFaultTolerance.get_optimizer_wrapper(origin)

    def update(made: Any, gradients: Any) -> Any:  # in place of TensorReport: an update begins
        tft_start_updating_os()
        return origin.__call__(made, gradients)

    kind.__call__ = update
    made = kind(*given)
    for name in ("allreduce_sum", "report", "report_end"):  # compiled, and unknown to a CPU
        delattr(made, name)
        setattr(made, name, Twice())
    return made
