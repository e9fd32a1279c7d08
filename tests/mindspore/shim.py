"""
Stand-ins for Ascend functions, so that MindSpore's own callback runs on a CPU.

The comment on each names what it replaces. The test gives `link`, the connection between ranks.
"""

from types import SimpleNamespace
from typing import Any

import mindspore
from mindio_ttp.framework_ttp import tft_start_updating_os
from mindio_ttp.processor import processor
from mindspore import nn
from mindspore.train.callback import _train_fault_tolerance as stock
from mindspore.utils import utils


def get_context(key: str) -> Any:  # replaces mindspore.context's, to name Ascend as the device
    return "Ascend" if key == "device_target" else mindspore.get_context(key)


class Twice(nn.Cell):  # type: ignore[misc]  # replaces AllReduce and TensorReport by a doubling of their input
    def construct(self, *given: Any) -> Any:
        return given[-1] + given[-1]


def install(link: Any) -> None:
    asked = mindspore.get_auto_parallel_context
    context = SimpleNamespace(get_context=get_context, get_auto_parallel_context=asked)
    hccl = SimpleNamespace(resume_hccl_comm=link.resume)
    stock.context = utils.context = context  # replaces the context that the checks for Ascend read
    stock._stop_device = lambda device: link.stop()  # replaces the abort of the device's work
    stock._repair_device = lambda device: None  # replaces the remapping of lost memory
    stock._get_uce_mem_info = lambda device: None  # replaces the query for lost addresses
    stock._get_uce_process_strategy = lambda: "RS_UCE_HIGHLEVEL"  # replaces the query for owners
    stock.clean_tdt_channel = lambda: None  # replaces the clearing of a data sink: there is none
    stock.reset_params = len  # replaces the reset of accumulated gradients: there are none
    stock.send_recv = link.send_recv  # replaces HCCL's send and receive between two ranks
    stock._rebuild_group = link.resume  # replaces the rebuild of HCCL's groups with a new process
    stock.CollectiveManager = SimpleNamespace(get_instance=lambda: hccl)  # replaces HCCL's manager


def started() -> None:  # replaces the runtime's error at the first call of a new process
    if processor.session.incarnation > 0 and not processor.begun:
        raise RuntimeError("ARF FINISH")


def optimizer(origin: type, *given: Any) -> Any:
    kind = stock.TrainFaultTolerance.get_optimizer_wrapper(origin)

    def update(made: Any, gradients: Any) -> Any:  # replaces TensorReport, which reports the update
        tft_start_updating_os()
        return origin.__call__(made, gradients)

    kind.__call__ = update
    made = kind(*given)
    for name in ("allreduce_sum", "report", "report_end"):  # replaces compiled operators
        delattr(made, name)
        setattr(made, name, Twice())
    return made
