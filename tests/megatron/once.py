"""
One rank alone in a process of its own: what becomes of a script's objects in an incident, and what is refused of
them. What came of it is printed as JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tft_megatron as adaptor
import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from tests.megatron import shim
from tests.megatron.gpt import MICRO_BATCH, Built, add_arguments, build, samples, sizes


class Session:
    """
    What `begin` and `enable` use of a session.
    """

    adaptor = "megatron"
    rank, world = 0, 1

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
    adaptor.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
    before = switched(built)
    private = adaptor.tft_capture(closing=True)
    built.wrapped.disable_forward_pre_hook(param_sync=False)
    built.wrapped.config.param_sync_func = None
    built.wrapped.eval()
    between = switched(built)
    adaptor.tft_rollback(private)
    return {"before": before, "between": between, "after": switched(built)}


CASES = {"evaluation": evaluation}

torch.set_num_threads(1)
shim.install()
parser = add_arguments(argparse.ArgumentParser())
parser.add_argument("case", choices=CASES)
args = parser.parse_args()
session = Session()
adaptor.begin(session, **sizes(args))
model_parallel_cuda_manual_seed(1)
init_num_microbatches_calculator(0, None, 2, MICRO_BATCH, 1)
data = adaptor.Data(samples)
found = CASES[args.case](build(args))
sys.stdout.write(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # gloo's own teardown hangs now and then
