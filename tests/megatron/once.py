"""
One rank in a process of its own, without `tft run`: what becomes of a script's objects in an incident, and what is refused of
them. What came of it is printed as JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tft_megatron
import torch
from megatron.core import parallel_state as ps
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.timers import Timers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from tft_megatron.adaptor import adaptor

from tests.megatron import shim
from tests.megatron.gpt import MICRO_BATCH, Built, add_arguments, build, samples, sizes
from tft.errors import OrderRefused, UsageError


class Session:
    """
    What `begin` and `enable` use of a session.
    """

    adaptor = "megatron"

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def adopt(self, **parts: Any) -> None:
        adaptor.tft_adopt(parts, None)


def switched(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    What a script switches.
    """
    wrapped = built.wrapped
    return {
        "hooks": len(wrapped.remove_forward_pre_hook_handles),
        "modules": len(list(wrapped.module.modules())),
        "training": [module.training for module in wrapped.modules()],
        "gathers": wrapped.config.param_sync_func is not None,
    }


def evaluation(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    An evaluation is broken off.
    """
    built.wrapped.config.param_sync_func = built.wrapped.start_param_sync
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    before = switched(built)
    private = adaptor.tft_capture(closing=True)
    built.wrapped.disable_forward_pre_hook(param_sync=False)
    built.wrapped.config.param_sync_func = None
    built.wrapped.eval()
    between = switched(built)
    adaptor.tft_rollback(private)
    return {"before": before, "between": between, "after": switched(built)}


def beginning(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    The first groups are formed.
    """
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    formed()
    model = built.wrapped.module
    weight = model.shared_embedding_or_output_weight() if args.pp > 1 else None
    return {
        "state": {name: adaptor.tft_digests()[name] for name in ("parameters", "optimizer")},
        "embeddings": None if weight is None else weight.detach().double().tolist(),
    }


def logged(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    A step is broken off when several tokens have been predicted in it.
    """
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    group = ps.get_data_parallel_group()
    MTPLossLoggingHelper.save_loss_to_tracker(torch.ones([]), 0, 1, avg_group=group)
    before = sorted(MTPLossLoggingHelper.tracker)
    adaptor.tft_clear()
    return {"before": before, "after": sorted(MTPLossLoggingHelper.tracker)}


def kept(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    The script keeps a group itself, in an object, then one in a dict, and then none.
    """

    def enable() -> None:
        tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)

    KEPT.summed_over = ps.get_data_parallel_group()
    found = [refused_by(enable)]
    del KEPT.summed_over
    own = {"summed over": ps.get_data_parallel_group()}
    found.append(refused_by(enable))
    own.clear()
    found.append(refused_by(enable))
    return {"refused": found, "size": ps.get_data_parallel_world_size()}


def late(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    The script keeps a group itself, once it has handed all over.
    """
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    KEPT.summed_over = ps.get_data_parallel_group()
    found = [refused_by(formed)]
    adaptor.tft_clear()
    found.append(refused_by(lambda: formed("again")))
    adaptor.tft_clear()
    del KEPT.summed_over
    return {"refused": [*found, refused_by(lambda: formed("at last"))]}


def stages(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    The last stage has another learning rate, as Megatron's `decoupled_lr` gives it.
    """
    if args.rank == args.world - 1:
        built.optimizer.param_groups[0]["is_decoupled_lr"] = True
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    return {"refused": refused_by(formed)}


def handed(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    What cannot be kept is handed over.
    """
    config = built.wrapped.module.decoder.layers[0].config
    everything = (session, built.wrapped, built.optimizer)
    config.cuda_graph_impl = "local"
    found = [refused_by(lambda: tft_megatron.enable(*everything, built.scheduler, data=data))]
    config.cuda_graph_impl = "none"
    found.append(refused_by(lambda: tft_megatron.enable(*everything, data=data)))
    found.append(refused_by(lambda: tft_megatron.enable(*everything, built.scheduler, data=args)))
    return {"refused": found}


def timed(built: Built) -> dict[str, Any]:  # Any: JSON
    """
    A step is broken off while Megatron takes its time.
    """
    timers = built.wrapped.config.timers = Timers(1, "minmax")
    tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    timers("forward-backward", log_level=1).start()
    adaptor.tft_clear()
    timers("forward-backward", log_level=1).start()
    return {"runs": timers("forward-backward")._started}


def formed(name: str = "first") -> None:
    """
    The groups of this name.
    """
    adaptor.tft_regroup(name, "127.0.0.1", args.port, args.rank, args.world)
    adaptor.tft_rebuild()


def refused_by(call: Callable[[], object]) -> str:
    """
    The sentence, or nothing.
    """
    try:
        call()
    except (UsageError, OrderRefused) as error:
        return str(error)
    return ""


KEPT = argparse.Namespace()
CASES = {
    "evaluation": evaluation, "beginning": beginning, "logged": logged, "kept": kept, "late": late,
    "stages": stages, "handed": handed, "timed": timed,
}  # fmt: skip

torch.set_num_threads(1)
shim.install()
parser = add_arguments(argparse.ArgumentParser())
parser.add_argument("case", choices=CASES)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--world", type=int, default=1)
parser.add_argument("--port", type=int)
args = parser.parse_args()
session = Session(args.rank, args.world)
tft_megatron.begin(session, **sizes(args))
torch.manual_seed(args.rank)
model_parallel_cuda_manual_seed(1)
init_num_microbatches_calculator(0, None, 2, MICRO_BATCH, 1)
data = tft_megatron.Data(samples)
found = CASES[args.case](build(args))
sys.stdout.write(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # gloo's own teardown hangs now and then
