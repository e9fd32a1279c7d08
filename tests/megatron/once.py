"""
Cases that one rank plays in its own process, without `tft run`.

The cases check the effect of an incident on a script's objects, and the objects that the adaptor
refuses. `test_once.py` starts the processes.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tft_megatron
import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.timers import Timers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from tft_megatron import adaptor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from tests.megatron import shim
from tests.megatron.extra import Counter
from tests.megatron.gpt import MICRO_BATCH, add_arguments, build, forward, samples, sizes
from tft.errors import OrderRefused, UsageError
from tft.spi import unpack

Found = dict[str, Any]  # Any: plain values


def run(
    answer: Connection, case: str, arguments: tuple[str, ...], rank: int, world: int, port: int
) -> None:
    """
    Run one case in this process and send its result through `answer`.

    `case` is the name of a method of `Script`. The process then waits to be killed, because gloo's
    own teardown sometimes hangs.
    """
    torch.set_num_threads(1)
    shim.install()
    args = add_arguments(argparse.ArgumentParser()).parse_args(arguments)
    answer.send(getattr(Script(args, rank, world, port), case)())
    answer.poll(None)


class Session:
    """
    A stand-in for `tft.Session`, with only the members that `tft_megatron.begin` and
    `tft_megatron.enable` use.
    """

    adaptor = "megatron"

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def adopt(self, *, save: None, load: None, **parts: Any) -> None:
        adaptor.tft_adopt(parts, None)


class Script:
    """
    A training script that has built its model, optimizer, scheduler and data. Each case is one
    method.
    """

    def __init__(self, args: argparse.Namespace, rank: int, world: int, port: int) -> None:
        self.args = args
        self.port = port
        self.session = Session(rank, world)
        tft_megatron.begin(self.session, **sizes(args))
        torch.manual_seed(rank)
        model_parallel_cuda_manual_seed(1)
        init_num_microbatches_calculator(0, None, 2, MICRO_BATCH, 1)
        self.data = tft_megatron.Data(samples)
        self.built = build(args)
        self.wrapped = self.built.wrapped

    # ------------------------------------------------------------ the cases

    def evaluation(self) -> Found:
        """
        Interrupt an evaluation with a rollback, after the script has set the last switches between
        `enable` and the first groups. Return the model's switches before, during and after.
        """
        config = self.wrapped.config
        config.param_sync_func = self.wrapped.start_param_sync
        self.enable()
        config.grad_sync_func = self.wrapped.start_grad_sync
        self.form()
        before = self.switched()
        local_state = adaptor.tft_capture(closing=True)
        self.wrapped.disable_forward_pre_hook(param_sync=False)
        config.grad_sync_func = config.param_sync_func = None
        self.wrapped.eval()
        between = self.switched()
        adaptor.tft_clear()
        self.form("again")
        adaptor.tft_rollback(local_state, 0)
        return {"before": before, "between": between, "after": self.switched()}

    def beginning(self) -> Found:
        """
        Form the first groups; return the digests of the state and the embedding weights.
        """
        self.enable()
        self.form()
        model = self.wrapped.module
        weight = model.shared_embedding_or_output_weight() if self.args.pp > 1 else None
        return {
            "state": {name: adaptor.tft_digests()[name] for name in ("parameters", "optimizer")},
            "embeddings": None if weight is None else weight.detach().double().tolist(),
        }

    def logged(self) -> Found:
        """
        Interrupt a step after Megatron has recorded a loss of multi-token prediction.
        """
        self.enable()
        group = ps.get_data_parallel_group()
        MTPLossLoggingHelper.save_loss_to_tracker(torch.ones([]), 0, 1, avg_group=group)
        before = sorted(MTPLossLoggingHelper.tracker)
        adaptor.tft_clear()
        return {"before": before, "after": sorted(MTPLossLoggingHelper.tracker)}

    def timed(self) -> Found:
        """
        Interrupt a step while one of Megatron's timers runs; then start the timer again.
        """
        timers = self.wrapped.config.timers = Timers(1, "minmax")
        self.enable()
        timers("forward-backward", log_level=1).start()
        adaptor.tft_clear()
        timers("forward-backward", log_level=1).start()
        return {"runs": timers("forward-backward")._started}

    def kept(self) -> Found:
        """
        Call `enable` while the script keeps a process group: in an object, in a dict, and nowhere.
        """
        place = argparse.Namespace(summed_over=ps.get_data_parallel_group())
        found = [refused(self.enable)]
        del place.summed_over
        own = {"summed over": ps.get_data_parallel_group()}
        found.append(refused(self.enable))
        own.clear()
        found.append(refused(self.enable))
        return {"refused": found, "size": ps.get_data_parallel_world_size()}

    def late(self) -> Found:
        """
        Let the script take a process group after `enable`; return the refusals when new groups are
        formed.
        """
        self.enable()
        place = argparse.Namespace(summed_over=ps.get_data_parallel_group())
        found = [refused(self.form)]
        adaptor.tft_clear()
        found.append(refused(lambda: self.form("again")))
        adaptor.tft_clear()
        del place.summed_over
        return {"refused": [*found, refused(lambda: self.form("at last"))]}

    def tried(self) -> Found:
        """
        Run the model between `enable` and the first groups; return the refusal, if any.

        Megatron keeps process groups from this run.
        """
        self.enable()
        forward(samples(0), self.wrapped)
        return {"refused": refused(self.form)}

    def recomputed(self) -> Found:
        """
        Do as `tried`, with norms whose outputs Megatron drops and recomputes in the backward pass.
        """
        # without TransformerEngine, megatron-core 0.16 cannot do this for numbers of 8 bits
        tensor_parallel.CheckpointWithoutOutput = partial(CheckpointWithoutOutput, fp8=None)
        for layer in self.wrapped.module.decoder.layers:
            layer.recompute_input_layernorm = layer.recompute_pre_mlp_layernorm = True
        return self.tried()

    def reading(self) -> Found:
        """
        Load the script's own checkpoint before `enable`; return whether the checkpoint's values
        remain when the first groups are formed.
        """
        self.change_state()
        self.enable()
        return self.kept_masters()

    def told_to_read(self) -> Found:
        """
        Load the script's own checkpoint after `enable`, as a script does when tft asks for it.

        Returns whether the loaded values remain when the first groups are formed.
        """
        self.enable()
        self.change_state()
        adaptor.tft_replaced()
        return self.kept_masters()

    def counted(self) -> Found:
        """
        Roll back a rank whose routers have counted a forward pass.

        The rank replaces another rank. The other ranks have completed the step without that rank.
        """
        self.enable()
        routers = [module for module in self.wrapped.modules() if hasattr(module, "ga_steps")]
        for router in routers:
            router.ga_steps += 1
        adaptor.tft_rollback(adaptor.tft_capture(closing=False), 0)
        return {"counts": [int(router.ga_steps) for router in routers]}

    def extra(self) -> Found:
        """
        Interrupt a step in which a module has counted in its extra state, and save a checkpoint.

        Returns the modules whose extra states are kept, the count in the checkpoint and after the
        rollback, and the digests before, between and after.
        """
        counter = self.wrapped.module.counter = Counter(4)
        self.enable()
        self.form()
        local_state = adaptor.tft_capture(closing=True)
        digests = [adaptor.tft_digests()["parameters"]]
        counter.count = 5
        digests.append(adaptor.tft_digests()["parameters"])
        adaptor.tft_clear()
        self.form("again")
        saved: Found = {"counter._extra_state/shard_0_1": None}
        rest, *_ = adaptor.tft_shards(self.session.rank, self.session.world)
        with TemporaryDirectory() as place:
            adaptor.tft_save(Path(place), rest.shard, 1)
            load(saved, storage_reader=FileSystemReader(Path(place, rest.shard)), no_dist=True)
        counter.count = 0
        adaptor.tft_rollback(local_state, 1)
        digests.append(adaptor.tft_digests()["parameters"])
        (extra,) = saved.values()
        noted = unpack(unpack(local_state)["torch"])["extra"]
        return {
            "kept": list(noted), "saved": extra, "after": counter.count, "digests": digests,
        }  # fmt: skip

    def stages(self) -> Found:
        """
        Give the last stage another learning rate, as Megatron's `decoupled_lr` does; return the
        refusal.
        """
        if self.session.rank == self.session.world - 1:
            self.built.optimizer.param_groups[0]["is_decoupled_lr"] = True
        self.enable()
        return {"refused": refused(self.form)}

    def handed(self) -> Found:
        """
        Call `enable` with objects that tft cannot protect; return the refusals.
        """
        module = self.wrapped.module.decoder.layers[0].self_attention
        config = module.config = copy.copy(module.config)
        config.cuda_graph_impl = "local"
        found = [refused(self.enable)]
        config.cuda_graph_impl = "none"
        found.append(refused(lambda: self.enable(scheduler=None)))
        found.append(refused(lambda: self.enable(data=self.args)))
        return {"refused": found}

    # ------------------------------------------------------------ functions that the cases use

    def enable(self, **others: object) -> None:
        """
        Call `tft_megatron.enable` with the script's objects, of which `others` replaces some.
        """
        parts: dict[str, Any] = {"scheduler": self.built.scheduler, "data": self.data, **others}
        tft_megatron.enable(self.session, self.wrapped, self.built.optimizer, **parts)

    def change_state(self) -> None:
        """
        Change the optimizer's state by amounts that 16-bit numbers would lose.
        """
        inner = self.built.optimizer.chained_optimizers[0].optimizer
        for master in (p for group in inner.param_groups for p in group["params"]):
            master.data += 1e-5
            inner.state[master]["exp_avg"] = torch.ones_like(master)

    def kept_masters(self) -> Found:
        """
        Form the first groups and return whether the optimizer's state is unchanged.
        """
        before = adaptor.tft_digests()["optimizer"]
        self.form()
        return {"kept": adaptor.tft_digests()["optimizer"] == before}

    def form(self, name: str = "first") -> None:
        """
        Form the process groups with the name prefix `name`.
        """
        rank, world = self.session.rank, self.session.world
        adaptor.tft_regroup(name, "127.0.0.1", self.port, rank, world)
        adaptor.tft_rebuild()

    def switched(self) -> Found:
        """
        Return what a script or Megatron may switch for an evaluation: hooks, the training mode, and
        the functions that gather parameters and reduce gradients.
        """
        return {
            "hooks": len(self.wrapped.remove_forward_pre_hook_handles),
            "modules": len(list(self.wrapped.module.modules())),
            "training": [module.training for module in self.wrapped.modules()],
            "gathers": self.wrapped.config.param_sync_func is not None,
            "reduces": self.wrapped.config.grad_sync_func is not None,
        }


def refused(call: Callable[[], object]) -> str:
    """
    Call `call` and return the message of the refusal, or an empty string.
    """
    try:
        call()
    except (UsageError, OrderRefused) as error:
        return str(error)
    return ""
