"""
A training program with the structure of MindSpeed-LLM's, run over `mindio_ttp`.

The program trains a small GPT of megatron-core on several ranks. MindSpeed-LLM's high availability
is patched in.

    program.py DIRECTORY OPTIONS

The variable RANK holds the rank. The program writes its losses, its final state and its checkpoints
into DIRECTORY. OPTIONS is JSON:

- `source`: a directory of MindSpeed-LLM; without it the program uses the stand-in.
- `faults`: a list of [rank, step, where, text]; each fault happens once. `where` is `forward`
  (before the first micro-batch), `reduced` (after the all-reduce of the gradients) or `update`
  (after the update of one parameter). The text `kill` kills the process, `uce-low` and `uce-high`
  are errors of the device's memory, and any other text is raised as a RuntimeError.
- `warms`: a replacement is ready when a file of that name exists.
- `pace`: the minimum seconds of a step, so that a fault does not join the incident before it.
- `done`: the program trains until a file of that name exists, and two steps more.
- any other entry is an argument of Megatron.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

# a test that has waited too long sends SIGUSR1 to get the stacks of all threads
faulthandler.register(signal.SIGUSR1, all_threads=True)
directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(Path(__file__).parent / "standins" / "frameworks"))

import torch_npu  # noqa: E402  # imported first, as in MindSpeed-LLM

from tests.mindspeed import llm  # noqa: E402

llm.install(options.pop("source", ""))

import mindspeed.megatron_adaptor  # noqa: E402, F401  # as in MindSpeed-LLM's pretrain_gpt.py
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from apex.optimizers import FusedAdam  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from megatron.training import initialize, training  # noqa: E402
from megatron.training.global_vars import set_global_variables  # noqa: E402
from megatron.training.utils import unwrap_model  # noqa: E402
from mindspeed.patch_utils import MindSpeedPatchesManager  # noqa: E402
from mindspeed_llm.features_manager.high_availability.high_availability import (  # noqa: E402
    HighAvailabilityFeature,
)
from torch_npu.npu import state as devices  # noqa: E402

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
faults: list[list[Any]] = options.pop("faults", [])
done: str = options.pop("done", "")
warms: str = options.pop("warms", "")
pace: float = options.pop("pace", 0.0)
WORDS = 32


def arguments() -> Namespace:
    """
    Return the arguments as Megatron's parser would.
    """
    args = Namespace(
        rank=rank,
        world_size=world,
        distributed_backend="hccl",
        distributed_timeout_minutes=2,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        use_tp_pp_dp_mapping=False,
        nccl_communicator_config_path=None,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        seq_length=8,
        num_experts=None,
        micro_batch_size=1,
        global_batch_size=3 * world,
        rampup_batch_size=None,
        train_iters=8,
        train_samples=None,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skip_train=False,
        dataloader_type="single",
        lr=1e-2,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        reuse_fp32_param=False,
        use_custom_fsdp=False,
        finetune=False,
        seed=42,
        save=str(directory / "checkpoints"),
        load=str(directory / "checkpoints"),
        save_interval=0,
        pretrained_checkpoint=None,
        no_save_optim=None,
        no_save_rng=None,
        no_load_optim=None,
        no_load_rng=None,
        exit_on_missing_checkpoint=False,
        use_dist_ckpt=False,
        ckpt_format="torch",
        ckpt_fully_parallel_save=False,
        log_params_norm=False,
        timing_log_level=0,
        timing_log_option="minmax",
        tp_2d=False,
        swap_attention=False,
        swap_optimizer=False,
        disable_gloo_group=False,
        lora_target_modules=None,
        enable_high_availability=True,
        enable_hbmfault_repair=True,
        enable_worker_reboot=True,
        enable_elastic_training=False,
        distributed_optimizer_no_replica=False,
    )
    unknown = options.keys() - vars(args)
    assert not unknown, f"the program has no options {sorted(unknown)}"
    vars(args).update(options)
    args.data_parallel_size = world // (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return args


args = arguments()
set_global_variables(args)


# ---------------------------------------------------------------- injected faults


def strike(where: str) -> None:
    """
    Carry out the fault that `faults` plans for this rank, step and place, if any.
    """
    for place, (whom, step, at, text) in enumerate(faults):
        mark = directory / f"struck-{place}"
        if (whom, step, at) != (rank, args.iteration + 1, where) or mark.exists():
            continue
        mark.touch()
        # ranks with a fault at the same place fail together, however busy the machine is
        together = [n for n, (_, *when, _) in enumerate(faults) if when == [step, at]]
        while not all((directory / f"struck-{n}").exists() for n in together):
            time.sleep(0.005)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text in ("uce-low", "uce-high"):
            device = torch_npu.npu.current_device()
            devices.lose(device, devices.HIGH if text == "uce-high" else devices.LOW)
            if text == "uce-high":
                corrupt()
            text = "UCE ERROR. the memory of the device has an error that cannot be corrected"
        raise RuntimeError(text)


def corrupt() -> None:
    """
    Fill the parameters and the optimizer's state with NaN, as lost memory would be.
    """
    for chunk in trained.model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.param_data.fill_(float("nan"))
    for adam in adams():
        for group in adam.param_groups:
            for param in group["params"]:
                param.data.fill_(float("nan"))
                for each in adam.state[param].values():
                    each.fill_(float("nan"))


def struck_update(update: Any) -> Any:
    """
    Wrap an optimizer's update so that a planned fault can happen after its first parameter.
    """

    def step(self: Any, closure: Any = None) -> None:
        strike("reduced")
        groups = self.param_groups
        [first, *_] = groups
        if any(
            (whom, at) == (rank, "update") and step == args.iteration + 1
            for whom, step, at, _ in faults
        ):
            before = first.get("step", 0)
            param = first["params"][0]
            self.param_groups = [{**first, "params": [param]}]
            update(self)
            self.param_groups = groups
            strike("update")
            raise AssertionError(f"struck before: {before}")
        update(self)

    return step


# ---------------------------------------------------------------- the model and the data


def model_provider() -> Any:
    """
    Return a GPT model, with experts if the arguments ask for them.
    """
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **experts,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=WORDS,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )


class Sequences(torch.utils.data.Dataset[torch.Tensor]):
    """
    A data set in which each sequence depends only on its number.
    """

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(number)
        start, stride = (
            torch.randint(WORDS, (1,), generator=chance),
            torch.randint(1, 5, (1,), generator=chance),
        )
        return (start + stride * torch.arange(args.seq_length + 1)) % WORDS


def datasets_provider() -> tuple[Any, Any, Any]:
    """
    Return the training data; there is no validation or test data.
    """
    return Sequences(), None, None


local: list[str] = []
"""The losses of this rank's micro-batches in the step that is being trained."""


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """
    Return the loss summed over the tokens, the token count, and both for all ranks.

    The results have the form of MindSpeed-LLM's `pretrain_gpt.py`.
    """
    loss = torch.stack([output.float().sum(), torch.tensor(float(output.numel()))])
    reported = loss.clone().detach()
    if not llm.scaled_in():
        dist.all_reduce(reported, group=mpu.get_data_parallel_group())
    local.append(float(loss[0].detach()).hex())
    return loss[0], loss[1].detach().int(), {"lm loss": (reported[0], reported[1])}


def forward_step(data_iterator: Any, model: Any) -> Any:
    """
    Run the model on one micro-batch.
    """
    if not local:
        strike("forward")
    words = next(data_iterator)
    length = args.seq_length
    places = torch.arange(length)[None].expand(len(words), -1)
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)[None, None]
    return model(words[:, :-1], places, later, labels=words[:, 1:].contiguous()), loss_func


# ---------------------------------------------------------------- records of the run


def write(name: str, **facts: Any) -> None:
    """
    Append a JSON line to this rank's file `name`.
    """
    with (directory / f"{name}-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **facts}) + "\n")


def begins(model: Any, optimizer: Any, scheduler: Any) -> None:
    """
    Note the objects that the loop trains, at the beginning of a step, and wait `pace` seconds.
    """
    trained.model, trained.optimizer, trained.scheduler = model, optimizer, scheduler
    local.clear()
    time.sleep(pace)


def told(step: int, losses: Any) -> None:
    """
    Record the losses of a step before its update, and check whether the job is to end.
    """
    write(
        "steps", step=step, ranks=dist.get_world_size(mpu.get_data_parallel_group()), local=list(local),
        loss=float(losses["lm loss"]).hex(),
    )  # fmt: skip
    if done and not (directory / "ends").exists():
        time.sleep(0.01)
        if (directory / done).exists() and rank == 0:
            (directory / "ends.new").write_text(str(step + 2))
            (directory / "ends.new").replace(directory / "ends")
    if done and (directory / "ends").exists():
        args.train_iters = int((directory / "ends").read_text())


def adams() -> list[Any]:
    """
    Return the inner optimizers of Megatron's optimizer.
    """
    outer = getattr(trained.optimizer, "chained_optimizers", [trained.optimizer])
    return [each.optimizer for each in outer]


def digest(tensor: torch.Tensor) -> str:
    """
    Return a digest of all bits of a tensor.
    """
    import hashlib

    return hashlib.sha256(
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


def finals() -> dict[str, Any]:
    """
    Return this rank's final state.
    """
    [module] = unwrap_model(trained.model)
    found: list[list[Any]] = []
    for adam in adams():
        for group in adam.param_groups:
            kept = {key: value for key, value in group.items() if key != "params"}
            found.append([json.dumps(kept, default=str, sort_keys=True)])
            for param in group["params"]:
                state = adam.state[param]
                found.append([digest(param), *(digest(state[key]) for key in sorted(state))])
    return {
        "parameters": {name: digest(param) for name, param in module.named_parameters()},
        "optimizer": found,
        "scheduler": trained.scheduler.num_steps,
        "consumed": args.consumed_train_samples,
        "iteration": args.iteration,
    }


trained = Namespace(model=None, optimizer=None, scheduler=None)


def main() -> None:
    """
    Train, with the calls in the order of MindSpeed-LLM's `pretrain`.
    """
    torch.set_num_threads(1)
    init_num_microbatches_calculator(
        rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    patches = MindSpeedPatchesManager()
    feature = HighAvailabilityFeature()
    feature.pre_validate_args(args)
    feature.validate_args(args)
    feature.pre_register_patches(patches, args)
    patches.apply_patches()
    feature.register_patches(patches, args)
    patches.apply_patches()
    initialize._initialize_distributed()
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    FusedAdam.step = struck_update(FusedAdam.step)
    training.begins, training.told = begins, told
    trained.model, trained.optimizer, trained.scheduler = training.setup_model_and_optimizer(
        model_provider, ModelType.encoder_or_decoder
    )
    train_data, valid_data, test_data = training.build_train_valid_test_data_iterators(
        datasets_provider
    )
    train_args = [
        forward_step, trained.model, trained.optimizer, trained.scheduler, train_data, valid_data, None,
        get_model_config(trained.model[0]),
    ]  # fmt: skip
    llm.register(datasets_provider, model_provider, ModelType.encoder_or_decoder)
    write("started", reboot=llm.reboot())
    while llm.reboot() and warms and not (directory / warms).exists():
        time.sleep(0.05)
    llm.train(train_args, [test_data])
    (directory / f"final-{rank}.json").write_text(json.dumps(finals()))


main()
