"""
How high availability is switched on in a Megatron script: its arguments, `HIGH_AVAILABILITY`, what is refused
of them, and what follows for tft.

The names are those that users of MindSpeed-LLM know. The variable wins, but can only switch on. Nothing of
Megatron's is imported: arguments are settled before `tft.init`.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tft.errors import UsageError

_VARIABLE = "HIGH_AVAILABILITY"
_MASTER = "enable_high_availability"
_RETRY = "enable_hbmfault_repair"
_RECOVER = "enable_worker_reboot"
_ELASTIC = "enable_elastic_training"
_NO_REPLICA = "distributed_optimizer_no_replica"
_REPLICAS = "optimizer_replica_num"
_NOT_GIVEN = 2
"""R, where nothing is said."""

_OF_WORDS = {
    "dump": (_MASTER,),
    "retry": (_MASTER, _RETRY),
    "recover": (_MASTER, _RECOVER),
    "recover-in-place": (_MASTER, _RECOVER),
    "elastic-training": (_MASTER, _ELASTIC),
    "exit": (),
}
"""By word of `HIGH_AVAILABILITY`: what it switches on. `exit` is what is left when nothing is enabled."""

STRATEGIES = {"retry": _RETRY, "recover": _RECOVER, "dump": _MASTER}
"""What the adaptor takes part in, in the order in which tft tries it, and what switches each on."""

_FSDP = ("use_custom_fsdp", "use_megatron_fsdp", "use_torch_fsdp2")
_ELSEWHERE = {
    "swap_optimizer": "it moves optimizer state out of the device between steps",
    "reuse_fp32_param": "it keeps masters and parameters in the same memory",
    "optimizer_cpu_offload": "it splits the optimizer between device and host",
}
"""Arguments that put the state of the optimizer where the adaptor does not look for it."""

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "nccl_communicator_config_path",
    "distributed_timeout_minutes",
)
"""Of a Megatron script's arguments those that `initialize_model_parallel` takes by the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """
    What follows from arguments and environment.
    """

    strategies: tuple[str, ...]
    """The strategies this rank takes part in, as `--enable` takes them."""
    replicas: int
    """How many ranks hold each shard of the optimizer, at least; 1: there are no copies."""
    sizes: Mapping[str, Any]  # Any: each has the type that Megatron gives it
    """What `begin` passes to `initialize_model_parallel`, `num_distributed_optimizer_instances` included."""


_settled: Settled | None = None


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """
    Add the arguments: Megatron takes this as its `extra_args_provider`.
    """
    group = parser.add_argument_group(title="high availability")
    group.add_argument(
        _flag(_MASTER),
        action="store_true",
        help="switch high availability on: the survivors of a fault save a last checkpoint",
    )
    group.add_argument(
        _flag(_RETRY),
        action="store_true",
        help="repair ranks that have lost memory or a connection, without restarting a process",
    )
    group.add_argument(
        _flag(_RECOVER),
        action="store_true",
        help="start a process in the place of one that has ended, without restarting the others",
    )
    group.add_argument(
        _flag(_NO_REPLICA),
        action="store_true",
        help="cut the distributed optimizer over all data-parallel ranks, without copies: what a rank "
        "loses comes back from the newest checkpoint",
    )
    group.add_argument(
        _flag(_REPLICAS),
        type=int,
        default=_NOT_GIVEN,
        metavar="R",
        help="how many ranks hold each shard of the distributed optimizer",
    )
    group.add_argument(
        _flag(_ELASTIC),
        action="store_true",
        help="go on with fewer ranks: checked, and refused, since this version does not have it",
    )
    return parser


def settle(args: Namespace) -> Settled:
    """
    Switch on what the environment says, check the whole, and remember it for `tft.init`: to be called
    before that, once the arguments are parsed. Megatron's own `num_distributed_optimizer_instances` is
    set to match. Raises `UsageError`; then `args` is as it was.
    """
    global _settled
    asked = Namespace(**{**vars(args), **_switches(os.environ.get(_VARIABLE, ""))})
    check(asked)
    replicas = _replicas(asked)
    if _has(asked, _MASTER) and _has(asked, "use_distributed_optimizer"):
        asked.num_distributed_optimizer_instances = replicas
    vars(args).update(vars(asked))
    _settled = Settled(
        strategies=_strategies(asked),
        replicas=_holders(asked, replicas),
        sizes=_sizes(asked, replicas),
    )
    return _settled


def enabled() -> tuple[str, ...]:
    """
    The strategies this rank takes part in: those that were settled. In a script without such arguments
    those of the environment, and where that has none, all. Raises `UsageError`.
    """
    if _settled is not None:
        return _settled.strategies
    words = os.environ.get(_VARIABLE, "")
    if not words.strip():
        return tuple(STRATEGIES)
    asked = Namespace(**_switches(words))
    if _has(asked, _ELASTIC):
        raise _not_yet()
    return _strategies(asked)


def check(args: Namespace) -> None:
    """
    Refuse what does not go together, or cannot be kept. Raises `UsageError`.
    """
    if not _has(args, _MASTER):
        _refuse_parts_of_nothing(args)
        return
    _refuse_other_optimizers(args)
    replicas = _replicas(args)
    if replicas > 1:
        _refuse_single_ranks(args)
        if _has(args, "use_distributed_optimizer"):
            _refuse_uneven_shares(args, replicas)
        else:
            _refuse_number_of_whole_copies(args, replicas)
    if _has(args, _ELASTIC):
        _refuse_elastic(args)


# ---------------------------------------------------------------- the variable


def _switches(words: str) -> dict[str, bool]:
    """
    The arguments that `HIGH_AVAILABILITY` switches on, each with True.
    """
    found: dict[str, bool] = {}
    for word in (each.strip().lower() for each in words.split(",")):
        if word and word not in _OF_WORDS:
            raise UsageError(
                f"{_VARIABLE} is {words!r}, in which {word!r} is not known: expected are "
                f"{', '.join(_OF_WORDS)}, with commas between"
            )
        found.update(dict.fromkeys(_OF_WORDS.get(word, ()), True))
    return found


# ---------------------------------------------------------------- what is refused


def _refuse_parts_of_nothing(args: Namespace) -> None:
    for part in (_RETRY, _RECOVER, _ELASTIC):
        if _has(args, part):
            raise UsageError(
                f"{_flag(part)} is a part of high availability, which is off: give {_flag(_MASTER)}, too"
            )


def _refuse_other_optimizers(args: Namespace) -> None:
    for name in _FSDP:
        if _has(args, name):
            raise UsageError(
                f"{_flag(name)} cannot be had with {_flag(_MASTER)}: the adaptor knows the parameters of "
                "Megatron's DistributedDataParallel. Take one of the two away"
            )
    for name, why in _ELSEWHERE.items():
        if _has(args, name):
            raise UsageError(
                f"{_flag(name)} cannot be had with {_flag(_MASTER)}: {why}, where it cannot be copied from "
                "one rank to another. Take one of the two away"
            )


def _refuse_single_ranks(args: Namespace) -> None:
    dense = _dense(args)
    if dense <= 1:
        raise UsageError(
            f"with {_world(args)} ranks, data-parallel times context-parallel size is {dense}: nothing has a "
            f"copy. Expected are 2 or more; or, with {_flag('use_distributed_optimizer')}, "
            f"{_flag(_NO_REPLICA)} and checkpoints to go back to"
        )
    experts = _experts(args)
    if experts is not None and experts <= 1:
        raise UsageError(
            f"with {_world(args)} ranks, the experts' data-parallel size is {experts}: no expert has a copy. "
            f"Expected are 2 or more, such as with a smaller {_flag('expert_model_parallel_size')}; or "
            f"{_flag(_NO_REPLICA)} and checkpoints to go back to"
        )


def _refuse_uneven_shares(args: Namespace, replicas: int) -> None:
    sizes = {
        "data-parallel times context-parallel size": _dense(args),
        "the experts' data-parallel size": _experts(args),
    }
    for what, size in sizes.items():
        if size is not None and size % replicas:
            raise UsageError(
                f"{what} is {size}, which {_flag(_REPLICAS)} {replicas} does not divide: each shard of the "
                "optimizer is to be on as many ranks"
            )


def _refuse_number_of_whole_copies(args: Namespace, replicas: int) -> None:
    if replicas not in (_NOT_GIVEN, _holders(args, replicas)):
        raise UsageError(
            f"{_flag(_REPLICAS)} is {replicas}, and without {_flag('use_distributed_optimizer')} every rank of a "
            f"data-parallel group, here {_holders(args, replicas)}, has all of the optimizer: give that, or take the "
            "number away"
        )


def _refuse_elastic(args: Namespace) -> None:
    flag = _flag(_ELASTIC)
    if not _has(args, "use_distributed_optimizer"):
        raise UsageError(
            f"{flag} needs {_flag('use_distributed_optimizer')}: give both, or neither"
        )
    if _has(args, _NO_REPLICA):
        raise UsageError(
            f"{flag} needs the copies that {_flag(_NO_REPLICA)} does without: take one of the two away"
        )
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        size = _size(args, name)
        if size > 1:
            raise UsageError(
                f"{flag} takes ranks away by their place in the data-parallel group alone, and "
                f"{_flag(name)} is {size}: expected is 1"
            )
    raise _not_yet()


def _not_yet() -> UsageError:
    return UsageError(
        f"this version cannot go on with fewer ranks of a Megatron job: take {_flag(_ELASTIC)} away, and "
        f"elastic-training out of {_VARIABLE}"
    )


# ---------------------------------------------------------------- what is asked for


def _strategies(args: Namespace) -> tuple[str, ...]:
    return tuple(strategy for strategy, switch in STRATEGIES.items() if _has(args, switch))


def _replicas(args: Namespace) -> int:
    """
    How many ranks hold each shard. Raises `UsageError` for a number that makes no copies.
    """
    if not _has(args, _MASTER):
        return 1
    instances = getattr(args, "num_distributed_optimizer_instances", 1)
    if _has(args, _NO_REPLICA):
        if instances != 1:
            raise UsageError(
                f"--num-distributed-optimizer-instances is {instances}, of which each has a copy, and "
                f"{_flag(_NO_REPLICA)} is to do without: take one of the two away"
            )
        return 1
    replicas: int = getattr(args, _REPLICAS, _NOT_GIVEN)
    if replicas < 2:
        raise UsageError(
            f"{_flag(_REPLICAS)} is {replicas}; expected are 2 or more, or {_flag(_NO_REPLICA)} where there "
            "are to be no copies"
        )
    if instances not in (1, replicas):
        raise UsageError(
            f"--num-distributed-optimizer-instances is {instances} and {_flag(_REPLICAS)} is {replicas}: each "
            f"instance has one copy, so say {_flag(_REPLICAS)} {instances}"
        )
    return replicas


def _holders(args: Namespace, replicas: int) -> int:
    """
    What comes of that number: an optimizer that is not distributed is held by all that sum its gradients.
    """
    if not _has(args, _MASTER) or _has(args, "use_distributed_optimizer"):
        return replicas
    experts = _experts(args)
    return _dense(args) if experts is None else min(_dense(args), experts)


def _sizes(args: Namespace, replicas: int) -> Mapping[str, Any]:  # Any: see `Settled.sizes`
    sizes = {name: getattr(args, name) for name in _SIZES if getattr(args, name, None) is not None}
    if _has(args, "use_tp_pp_dp_mapping"):
        sizes["order"] = "tp-cp-ep-pp-dp"
    if not getattr(args, "enable_gloo_process_groups", True):
        sizes["create_gloo_process_groups"] = False
    if _has(args, "use_distributed_optimizer"):
        own = getattr(args, "num_distributed_optimizer_instances", 1)
        sizes["num_distributed_optimizer_instances"] = replicas if _has(args, _MASTER) else own
    return sizes


def _dense(args: Namespace) -> int:
    """
    How many ranks hold the same dense parameters.
    """
    cut = _size(args, "tensor_model_parallel_size") * _size(args, "pipeline_model_parallel_size")
    return _world(args) // cut


def _experts(args: Namespace) -> int | None:
    """
    How many ranks hold the same experts; None where experts are not spread over ranks.
    """
    spread = _size(args, "expert_model_parallel_size")
    if spread == 1:
        return None
    tensor = getattr(args, "expert_tensor_parallel_size", None)
    cut = _size(args, "tensor_model_parallel_size") if tensor is None else tensor
    return _world(args) // (spread * cut * _size(args, "pipeline_model_parallel_size"))


def _world(args: Namespace) -> int:
    world: int | None = getattr(args, "world_size", None)
    return int(os.environ.get("WORLD_SIZE", "1")) if world is None else world


def _size(args: Namespace, name: str) -> int:
    size: int | None = getattr(args, name, None)
    return 1 if size is None else size


def _has(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, False))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
