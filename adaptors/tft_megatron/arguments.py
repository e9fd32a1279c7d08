"""
Handles the command-line arguments and the environment variable `HIGH_AVAILABILITY` by which a
Megatron script switches high availability on. This module refuses combinations that cannot work,
and derives the settings for tft.

The arguments have the same names as in MindSpeed-LLM. The environment variable can switch features
on, but cannot switch off a feature that an argument switches on. This module imports nothing from
Megatron, because a script reads its arguments before it calls `tft.init`.
"""

import math
import os
import sys
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
"""The number of ranks that hold each shard of the optimizer, if `--optimizer-replica-num` is not
given."""

_OF_WORDS = {
    "dump": (_MASTER,),
    "retry": (_MASTER, _RETRY),
    "recover": (_MASTER, _RECOVER),
    "recover-in-place": (_MASTER, _RECOVER),
    "elastic-training": (_MASTER, _ELASTIC),
    "exit": (),
}
"""Maps each word that `HIGH_AVAILABILITY` may contain to the arguments that the word switches on.
The word `exit` switches nothing on. If the variable contains only this word, high availability is
off on purpose."""

STRATEGIES = {"retry": _RETRY, "recover": _RECOVER, "dump": _MASTER}
"""Maps each strategy that the adaptor supports to the argument that switches the strategy on. The
strategies have the order in which tft tries them."""

_FSDP = ("use_custom_fsdp", "use_megatron_fsdp", "use_torch_fsdp2")
_ELSEWHERE = {
    "swap_optimizer": "it moves optimizer state out of the device between steps",
    "reuse_fp32_param": "it keeps masters and parameters in the same memory",
    "optimizer_cpu_offload": "it splits the optimizer between device and host",
}
"""Maps each refused argument to the reason that the error message gives. With these arguments,
Megatron keeps the optimizer's state in places that the adaptor does not read."""

_NEEDED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "use_distributed_optimizer",
)
"""The Megatron arguments that decide which ranks hold the same state. A script that lacks one of
these arguments is refused, because this module would compute wrong groups of ranks."""

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
"""The arguments of a Megatron script that are also arguments of `initialize_model_parallel`, with
the same names."""

_DENSE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERTS = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
)
"""The arguments whose product must divide the number of ranks: `_DENSE` for the dense parameters
(all parameters apart from experts), `_EXPERTS` for the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """
    The settings for tft that `settle` has derived from the arguments and the environment.
    """

    strategies: tuple[str, ...]
    """The strategies that are switched on, by the names that `tft run --enable` takes."""
    replicas: int
    """The number of ranks that hold each shard of the optimizer. If shards have different numbers
    of holders, this is the smallest number. 1 means that each shard is on one rank only."""
    sizes: Mapping[str, Any]  # Any: the arguments have various types
    """The arguments that `begin` passes to `initialize_model_parallel`, including
    `num_distributed_optimizer_instances`."""


_settled: Settled | None = None


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """
    Add the arguments for high availability to `parser`. A script passes this function to Megatron
    as `extra_args_provider`.
    """
    group = parser.add_argument_group(title="high availability")
    group.add_argument(
        _flag(_MASTER),
        action="store_true",
        help="switch high availability on: the ranks that survive a fault save a last checkpoint",
    )
    group.add_argument(
        _flag(_RETRY),
        action="store_true",
        help="repair ranks that have lost memory or a connection, without restarting a process",
    )
    group.add_argument(
        _flag(_RECOVER),
        action="store_true",
        help="start a new process for a rank whose process has ended, without restarting others",
    )
    group.add_argument(
        _flag(_NO_REPLICA),
        action="store_true",
        help="cut the distributed optimizer over all data-parallel ranks, without copies: lost state "
        "comes back from the newest checkpoint",
    )
    group.add_argument(
        _flag(_REPLICAS),
        type=int,
        metavar="R",
        help="how many ranks hold each shard of the distributed optimizer, 2 if not given",
    )
    group.add_argument(
        _flag(_ELASTIC),
        action="store_true",
        help="go on with fewer ranks after a fault: refused, because this version cannot do this",
    )
    return parser


def settle(args: Namespace) -> Settled:
    """
    Combine the arguments with `HIGH_AVAILABILITY`, check the result, and store the result for
    `tft.init`.

    Call this function before `tft.init`, after the arguments are parsed. It sets the attribute
    `num_distributed_optimizer_instances` of `args`, which Megatron reads, to the number of ranks
    that hold each shard.

    If neither the arguments nor the variable switch anything on, rank 0 warns on stderr that the
    job will survive no fault. `HIGH_AVAILABILITY=exit` says that this is intended, so that rank 0
    does not warn.

    If the check fails, the process writes the reason to stderr and exits with code 2, as an
    argument parser does. In this case `args` is not changed.
    """
    try:
        return _settle(args)
    except UsageError as refused:
        sys.stderr.write(f"tft: {refused}\n")
        sys.exit(2)


def _settle(args: Namespace) -> Settled:
    global _settled
    words = os.environ.get(_VARIABLE, "")
    asked = Namespace(**{**vars(args), **_switches(words)})
    _refuse_other_names(asked)
    _refuse_exit_beside_arguments(asked, words)
    check(asked)
    replicas = _replicas(asked)
    if _has(asked, _MASTER) and _has(asked, "use_distributed_optimizer"):
        asked.num_distributed_optimizer_instances = replicas
    vars(args).update(vars(asked))
    if _settled is None and not _has(asked, _MASTER) and not _words(words):
        _tell_that_all_is_off()
    _settled = Settled(
        strategies=_strategies(asked),
        replicas=_holders(asked, replicas),
        sizes=_sizes(asked, replicas),
    )
    return _settled


def enabled() -> tuple[str, ...]:
    """
    Return the strategies that are switched on for this rank.

    If the script has called `settle`, the result is what `settle` has stored. Otherwise the result
    is the strategies that `HIGH_AVAILABILITY` names, or all strategies if the variable is empty.

    Raises `UsageError` if `HIGH_AVAILABILITY` has an unknown word or a strategy that is not
    supported.
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
    Raise `UsageError` if arguments contradict each other, or ask for something that the adaptor
    does not support.
    """
    if not _has(args, _MASTER):
        _refuse_parts_of_nothing(args)
        return
    _refuse_other_optimizers(args)
    replicas = _replicas(args)
    _refuse_other_worlds(args)
    if replicas > 1:
        _refuse_single_ranks(args)
        if _has(args, "use_distributed_optimizer"):
            _refuse_uneven_shares(args, replicas)
        else:
            _refuse_number_of_whole_copies(args)
    if _has(args, _ELASTIC):
        _refuse_elastic(args)


# ---------------------------------------------------------------- the variable


def _switches(words: str) -> dict[str, bool]:
    """
    Return the arguments that `HIGH_AVAILABILITY` switches on, each with the value True. Raises
    `UsageError` for an unknown word.
    """
    found: dict[str, bool] = {}
    for word in _words(words):
        if word not in _OF_WORDS:
            raise UsageError(
                f"{_VARIABLE} is {words!r}, which contains the unknown word {word!r}: expected are "
                f"{', '.join(_OF_WORDS)}, with commas between"
            )
        found.update(dict.fromkeys(_OF_WORDS[word], True))
    return found


def _words(words: str) -> list[str]:
    return [each.strip().lower() for each in words.split(",") if each.strip()]


def _tell_that_all_is_off() -> None:
    if os.environ.get("RANK", "0") != "0":  # only rank 0 prints the warning
        return
    sys.stderr.write(
        f"tft: high availability is off: neither the arguments nor {_VARIABLE} switch it on. No "
        f"fault will be repaired, and no last checkpoint saved. Give {_flag(_MASTER)} with "
        f"{_flag(_RETRY)} and {_flag(_RECOVER)}, or {_VARIABLE}=retry,recover,dump; "
        f"{_VARIABLE}=exit says that this is meant\n"
    )


# ---------------------------------------------------------------- refused arguments


def _refuse_other_names(args: Namespace) -> None:
    missing = [name for name in _NEEDED if not hasattr(args, name)]
    if missing:
        raise UsageError(
            f"the arguments lack {', '.join(missing)}, which say which ranks hold copies of the "
            "same state: Megatron's own names are expected. If the script uses other names, set "
            "Megatron's names in the Namespace before the call of tft_megatron.settle"
        )


def _refuse_exit_beside_arguments(args: Namespace, words: str) -> None:
    if _words(words) == ["exit"] and _has(args, _MASTER):
        raise UsageError(
            f"{_VARIABLE} is {words!r}, which switches high availability off, but {_flag(_MASTER)} "
            "is given: remove one of the two"
        )


def _refuse_parts_of_nothing(args: Namespace) -> None:
    parts = [part for part in (_RETRY, _RECOVER, _NO_REPLICA, _ELASTIC) if _has(args, part)]
    if getattr(args, _REPLICAS, None) is not None:
        parts.append(_REPLICAS)
    if parts:
        raise UsageError(
            f"{_flag(parts[0])} is a part of high availability, which is off: give "
            f"{_flag(_MASTER)} as well"
        )


def _refuse_other_optimizers(args: Namespace) -> None:
    for name in _FSDP:
        if _has(args, name):
            raise UsageError(
                f"{_flag(name)} cannot be used with {_flag(_MASTER)}: the adaptor supports only "
                "parameters of Megatron's DistributedDataParallel. Remove one of the two"
            )
    for name, why in _ELSEWHERE.items():
        if _has(args, name):
            raise UsageError(
                f"{_flag(name)} cannot be used with {_flag(_MASTER)}: {why}, and such state cannot "
                "be copied from one rank to another. Remove one of the two"
            )


def _refuse_other_worlds(args: Namespace) -> None:
    world = _world(args)
    for cut in (_DENSE, _EXPERTS):
        sizes = {name: _cut(args, name) for name in cut}
        if world % math.prod(sizes.values()):
            said = " times ".join(f"{_flag(name)} {size}" for name, size in sizes.items())
            raise UsageError(
                f"{world} ranks cannot be divided among these sizes: {said} is "
                f"{math.prod(sizes.values())}, which does not divide {world}"
            )


def _refuse_single_ranks(args: Namespace) -> None:
    dense = _dense(args)
    if dense == 1:
        raise UsageError(
            f"with {_world(args)} ranks, data-parallel times context-parallel size is {dense}, so "
            "no state has a copy. Choose sizes with which it is 2 or more. To train without "
            f"copies, give {_flag('use_distributed_optimizer')} and {_flag(_NO_REPLICA)}: lost "
            "state then comes back from the newest checkpoint"
        )
    experts = _experts(args)
    if experts == 1:
        raise UsageError(
            f"with {_world(args)} ranks, the experts' data-parallel size is {experts}, so no "
            "expert has a copy. Choose sizes with which it is 2 or more, for example a smaller "
            f"{_flag('expert_model_parallel_size')}. To train without copies, give "
            f"{_flag(_NO_REPLICA)}: lost state then comes back from the newest checkpoint"
        )


def _refuse_uneven_shares(args: Namespace, replicas: int) -> None:
    sizes = {
        "data-parallel times context-parallel size": _dense(args),
        "the experts' data-parallel size": _experts(args),
    }
    for what, size in sizes.items():
        if size is not None and size % replicas:
            raise UsageError(
                f"{what} is {size}, which cannot be divided by {_flag(_REPLICAS)} {replicas}: each "
                "shard of the optimizer must be on equally many ranks"
            )


def _refuse_number_of_whole_copies(args: Namespace) -> None:
    given = getattr(args, _REPLICAS, None)
    holders = _whole(args)
    if given not in (None, holders):
        raise UsageError(
            f"{_flag(_REPLICAS)} is {given}, but without {_flag('use_distributed_optimizer')} "
            f"every rank of a data-parallel group, here {holders}, holds the whole optimizer: give "
            f"{holders}, or remove the number"
        )


def _refuse_elastic(args: Namespace) -> None:
    flag = _flag(_ELASTIC)
    if not _has(args, "use_distributed_optimizer"):
        raise UsageError(
            f"{flag} needs {_flag('use_distributed_optimizer')}: give both, or neither"
        )
    if _has(args, _NO_REPLICA):
        raise UsageError(
            f"{flag} needs copies of the optimizer state on other ranks, and {_flag(_NO_REPLICA)} "
            "asks for none: remove one of the two"
        )
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        size = _size(args, name)
        if size > 1:
            raise UsageError(
                f"{flag} removes ranks by their place in the data-parallel group only, and "
                f"{_flag(name)} is {size}: it must be 1"
            )
    raise _not_yet()


def _not_yet() -> UsageError:
    return UsageError(
        f"this version cannot go on with fewer ranks of a Megatron job: take {_flag(_ELASTIC)} "
        f"away, and elastic-training out of {_VARIABLE}"
    )


# ---------------------------------------------------------------- the requested recoveries


def _strategies(args: Namespace) -> tuple[str, ...]:
    return tuple(strategy for strategy, switch in STRATEGIES.items() if _has(args, switch))


def _replicas(args: Namespace) -> int:
    """
    Return the number of ranks that must hold each shard of the optimizer, as the arguments ask.
    Return 1 if the arguments ask for no copies.

    Raises `UsageError` if the number is less than 2 but copies are wanted, and for arguments that
    contradict each other.
    """
    if not _has(args, _MASTER):
        return 1
    instances = getattr(args, "num_distributed_optimizer_instances", 1)
    if _has(args, _NO_REPLICA):
        if not _has(args, "use_distributed_optimizer"):
            raise UsageError(
                f"{_flag(_NO_REPLICA)} asks for no copies of the optimizer state, but without "
                f"{_flag('use_distributed_optimizer')} every rank of a data-parallel group has a "
                "copy: give both options, or neither"
            )
        if getattr(args, _REPLICAS, None) not in (None, 1):
            raise UsageError(
                f"{_flag(_REPLICAS)} is {getattr(args, _REPLICAS)}, but {_flag(_NO_REPLICA)} asks "
                "for no copies: remove one of the two"
            )
        if instances != 1:
            raise UsageError(
                f"--num-distributed-optimizer-instances is {instances}, each with a copy, but "
                f"{_flag(_NO_REPLICA)} asks for no copies: remove one of the two"
            )
        return 1
    given: int | None = getattr(args, _REPLICAS, None)
    replicas = _NOT_GIVEN if given is None else given
    if replicas < 2:
        raise UsageError(
            f"{_flag(_REPLICAS)} is {replicas}; expected is 2 or more, or {_flag(_NO_REPLICA)} for "
            "no copies"
        )
    if instances not in (1, replicas):
        raise UsageError(
            f"--num-distributed-optimizer-instances is {instances}, but {_flag(_REPLICAS)} is "
            f"{replicas}: each instance has one copy, so give {_flag(_REPLICAS)} {instances}"
        )
    return replicas


def _holders(args: Namespace, replicas: int) -> int:
    """
    Return the number of ranks that hold each shard of the optimizer. If shards have different
    numbers of holders, return the smallest number. `replicas` is the requested number of instances
    of the distributed optimizer.
    """
    if not _has(args, _MASTER) or _has(args, "use_distributed_optimizer"):
        return replicas
    return _whole(args)


def _whole(args: Namespace) -> int:
    """
    Return the number of ranks that hold the same optimizer state, if the optimizer is not
    distributed. The ranks that reduce their gradients together hold the same state. If the dense
    parameters are on another number of ranks than the experts, return the smaller number.
    """
    experts = _experts(args)
    return _dense(args) if experts is None else min(_dense(args), experts)


# Any: the sizes have various types
def _sizes(args: Namespace, replicas: int) -> Mapping[str, Any]:
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
    Return how many ranks hold the same dense parameters.
    """
    cut = _size(args, "tensor_model_parallel_size") * _size(args, "pipeline_model_parallel_size")
    return _world(args) // cut


def _experts(args: Namespace) -> int | None:
    """
    Return how many ranks hold the same experts. Return None if experts are not spread over ranks.
    """
    if _size(args, "expert_model_parallel_size") == 1:
        return None
    return _world(args) // math.prod(_cut(args, name) for name in _EXPERTS)


def _cut(args: Namespace, name: str) -> int:
    """
    Return the number of parts into which the argument `name` divides the ranks.

    If `expert_tensor_parallel_size` is not given, experts are divided by
    `tensor_model_parallel_size`, like all other parameters.
    """
    if name == "expert_tensor_parallel_size" and getattr(args, name, None) is None:
        name = "tensor_model_parallel_size"
    return _size(args, name)


def _world(args: Namespace) -> int:
    world: int | None = getattr(args, "world_size", None)
    if world is not None:
        return world
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or int(said) < 1:
        raise UsageError(f"WORLD_SIZE is {said!r}; expected is the number of ranks, at least 1")
    return int(said)


def _size(args: Namespace, name: str) -> int:
    size: int | None = getattr(args, name, None)
    return 1 if size is None else size


def _has(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, False))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
