"""How the adaptor reads the command line and the environment of a Megatron job."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
from tft_megatron import arguments
from tft_megatron.arguments import add_arguments, check, enabled, settle
from tft_megatron.settings import REFUSED

from tft.core.job.policy import STRATEGIES
from tft.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join((DOCS / room / "megatron.md").read_text() for room in ("howto", "reference"))
HA = "--enable-high-availability"
PLAIN = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": False,
}
"""Arguments that every Megatron script has, with their defaults."""
DISTRIBUTED = {"use_distributed_optimizer": True}
EXPERTS = {"expert_model_parallel_size": 2}


@pytest.fixture(autouse=True)
def nothing_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Reset the settled arguments and the environment, as in a new process.
    """
    monkeypatch.setattr(arguments, "_settled", None)
    monkeypatch.delenv("HIGH_AVAILABILITY", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def parsed(*words: str, **others: object) -> Namespace:
    """
    Return the parsed arguments of a Megatron script of four ranks; `others` overrides some of them.
    """
    args = add_arguments(ArgumentParser()).parse_args(words)
    for name, value in {**PLAIN, "world_size": 4, **others}.items():
        setattr(args, name, value)
    return args


# ---------------------------------------------------------------- enabled recoveries


@pytest.mark.parametrize(
    ("words", "strategies"),
    [
        ((), ()),
        ((HA,), ("dump",)),
        ((HA, "--enable-hbmfault-repair"), ("retry", "dump")),
        ((HA, "--enable-worker-reboot"), ("recover", "dump")),
        (
            (HA, "--enable-hbmfault-repair", "--enable-worker-reboot"),
            ("retry", "recover", "dump"),
        ),
    ],
)
def test_arguments_enable_their_strategies(
    words: tuple[str, ...], strategies: tuple[str, ...]
) -> None:
    """When the arguments are settled, then the rank takes part in the strategies that they name."""
    assert settle(parsed(*words)).strategies == strategies
    assert enabled() == strategies


@pytest.mark.parametrize(
    ("words", "strategies"),
    [
        ("dump", ("dump",)),
        ("retry", ("retry", "dump")),
        ("recover", ("recover", "dump")),
        ("recover-in-place", ("recover", "dump")),
        ("dump,retry,recover", ("retry", "recover", "dump")),
        (" RECOVER ,Retry,", ("retry", "recover", "dump")),
        ("exit", ()),
        ("", ()),
    ],
)
def test_the_environment_enables_its_strategies(
    words: str, strategies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `HIGH_AVAILABILITY` has known words in any case, then their strategies are enabled like
    those of arguments."""
    monkeypatch.setenv("HIGH_AVAILABILITY", words)
    args = parsed()
    assert settle(args).strategies == strategies
    assert args.enable_high_availability == ("dump" in strategies)
    assert args.enable_hbmfault_repair == ("retry" in strategies)
    assert args.enable_worker_reboot == ("recover" in strategies)


def test_the_environment_disables_no_strategy_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the environment names fewer strategies than the arguments, then the strategies of either
    are enabled."""
    monkeypatch.setenv("HIGH_AVAILABILITY", "retry")
    assert settle(parsed(HA, "--enable-worker-reboot")).strategies == ("retry", "recover", "dump")


def test_the_environment_completes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an argument needs another one, and the environment enables the other one, then the
    settings are complete."""
    monkeypatch.setenv("HIGH_AVAILABILITY", "dump")
    assert settle(parsed("--enable-worker-reboot")).strategies == ("recover", "dump")


def test_a_script_without_arguments_uses_all_strategies_or_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When no arguments were settled, then a rank takes part in all strategies, or in those that
    `HIGH_AVAILABILITY` names."""
    assert enabled() == ("retry", "recover", "dump")
    monkeypatch.setenv("HIGH_AVAILABILITY", "retry")
    assert enabled() == ("retry", "dump")
    monkeypatch.setenv("HIGH_AVAILABILITY", "retry,elastic-training")
    with pytest.raises(UsageError, match="cannot go on with fewer ranks"):
        enabled()


def test_strategies_are_in_the_order_in_which_they_are_tried() -> None:
    """When several strategies are enabled, then they have tft's names and tft's order."""
    assert [each for each in STRATEGIES if each in arguments.STRATEGIES] == list(
        arguments.STRATEGIES
    )


@pytest.mark.parametrize("words", ["persist", "dump,persist", "dump retry", "on"])
def test_an_unknown_word_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When `HIGH_AVAILABILITY` has an unknown word, then one line names the known ones, the process
    ends with code 2, and the arguments are unchanged."""
    monkeypatch.setenv("HIGH_AVAILABILITY", words)
    args = parsed(HA)
    before = dict(vars(args))
    with pytest.raises(SystemExit) as left:
        settle(args)
    assert left.value.code == 2
    odd = words.rpartition(",")[2]
    assert capsys.readouterr().err == (
        f"tft: HIGH_AVAILABILITY is {words!r}, which contains the unknown word {odd!r}: expected "
        "are dump, retry, recover, recover-in-place, elastic-training, exit, with commas between\n"
    )
    assert vars(args) == before


@pytest.mark.parametrize(
    ("words", "variable", "rank", "told"),
    [
        ((), None, "0", True),
        ((), " ,", "0", True),
        ((), None, "1", False),
        ((), "exit", "0", False),
        ((), "dump", "0", False),
        ((HA,), None, "0", False),
    ],
)
def test_rank_0_warns_once_when_no_strategy_is_enabled(
    words: tuple[str, ...],
    variable: str | None,
    rank: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When neither the arguments nor the environment enable a strategy, then rank 0 warns once that
    no fault will be repaired, and names the settings that would change this."""
    monkeypatch.setenv("RANK", rank)
    if variable is not None:
        monkeypatch.setenv("HIGH_AVAILABILITY", variable)
    args = parsed(*words)
    settle(args)
    settle(args)
    error = capsys.readouterr().err
    assert error.startswith("tft: high availability is off") == told
    assert error.count("\n") == told


@pytest.mark.parametrize("words", ["exit", " EXIT ,"])
def test_exit_beside_the_argument_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the environment disables all strategies and the arguments enable some, then this is
    refused. After other words `exit` is the last resort."""
    monkeypatch.setenv("HIGH_AVAILABILITY", words)
    with pytest.raises(SystemExit):
        settle(parsed(HA))
    assert capsys.readouterr().err == (
        f"tft: HIGH_AVAILABILITY is {words!r}, which switches high availability off, but {HA} "
        "is given: remove one of the two\n"
    )
    monkeypatch.setenv("HIGH_AVAILABILITY", "dump,exit")
    assert settle(parsed(HA)).strategies == ("dump",)


@pytest.mark.parametrize("words", [(), (HA,)])
def test_missing_megatron_arguments_are_refused_by_name(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """When a script uses other names for its sizes than Megatron, then the error lists the missing
    names."""
    args = parsed(*words, tp=2)
    del args.tensor_model_parallel_size, args.use_distributed_optimizer
    with pytest.raises(SystemExit):
        settle(args)
    assert capsys.readouterr().err.startswith(
        "tft: the arguments lack tensor_model_parallel_size, use_distributed_optimizer, which"
    )


# ---------------------------------------------------------------- effects of the arguments


@pytest.mark.parametrize(
    ("words", "others", "replicas", "instances"),
    [
        ((HA,), DISTRIBUTED, 2, 2),
        ((HA, "--optimizer-replica-num", "4"), DISTRIBUTED, 4, 4),
        ((HA, "--distributed-optimizer-no-replica"), DISTRIBUTED, 1, 1),
        ((HA,), {**DISTRIBUTED, "num_distributed_optimizer_instances": 2}, 2, 2),
        ((HA,), {}, 4, None),
        ((HA, "--optimizer-replica-num", "4"), {}, 4, None),
        ((HA,), {"world_size": 8, **EXPERTS}, 4, None),
        ((), DISTRIBUTED, 1, 1),
        ((), {**DISTRIBUTED, "num_distributed_optimizer_instances": 4}, 1, 4),
    ],
)
def test_optimizer_replicas_are_instances_of_the_distributed_optimizer(
    words: tuple[str, ...], others: dict[str, object], replicas: int, instances: int | None
) -> None:
    """When high availability is on, then the distributed optimizer has as many instances as
    replicas are requested. When high availability is off, then Megatron's own argument counts. An
    optimizer that is not distributed has a replica on every rank."""
    args = parsed(*words, **others)
    settled = settle(args)
    assert settled.replicas == replicas
    assert settled.sizes.get("num_distributed_optimizer_instances") == instances
    if words and instances is not None:
        assert args.num_distributed_optimizer_instances == instances
        assert settle(args) == settled


def test_parallel_sizes_are_read_from_megatrons_arguments() -> None:
    """When a script has Megatron's arguments, then the arguments of `initialize_model_parallel`
    follow from them."""
    args = parsed(
        HA,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=None,
        use_tp_pp_dp_mapping=True,
        enable_gloo_process_groups=False,
        hidden_size=64,
        **DISTRIBUTED,
    )
    assert settle(args).sizes == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "order": "tp-cp-ep-pp-dp",
        "create_gloo_process_groups": False,
        "num_distributed_optimizer_instances": 2,
    }


def test_the_world_size_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a script's arguments do not have the world size, then it is that of the environment."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = parsed(HA, **DISTRIBUTED)
    del args.world_size
    check(args)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UsageError, match="with 1 ranks"):
        check(args)
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(
        UsageError, match=r"^WORLD_SIZE is 'x'; expected is the number of ranks, at least 1$"
    ):
        check(args)


# ---------------------------------------------------------------- refused arguments


@pytest.mark.parametrize(
    ("words", "others", "sentence"),
    [
        (
            ("--enable-hbmfault-repair",),
            {},
            "--enable-hbmfault-repair is a part of high availability, which is off: give "
            "--enable-high-availability as well",
        ),
        (
            ("--enable-worker-reboot",),
            {},
            "--enable-worker-reboot is a part of high availability, which is off: give "
            "--enable-high-availability as well",
        ),
        (
            ("--distributed-optimizer-no-replica",),
            DISTRIBUTED,
            "--distributed-optimizer-no-replica is a part of high availability, which is off: give "
            "--enable-high-availability as well",
        ),
        (
            (HA, "--distributed-optimizer-no-replica"),
            {},
            "--distributed-optimizer-no-replica asks for no copies of the optimizer state, but "
            "without --use-distributed-optimizer every rank of a data-parallel group has a copy: "
            "give both options, or neither",
        ),
        (
            ("--enable-elastic-training",),
            {},
            "--enable-elastic-training is a part of high availability, which is off: give "
            "--enable-high-availability as well",
        ),
        (
            ("--optimizer-replica-num", "2"),
            DISTRIBUTED,
            "--optimizer-replica-num is a part of high availability, which is off: give "
            "--enable-high-availability as well",
        ),
        (
            (HA, "--distributed-optimizer-no-replica", "--optimizer-replica-num", "2"),
            DISTRIBUTED,
            "--optimizer-replica-num is 2, but --distributed-optimizer-no-replica asks for no "
            "copies: remove one of the two",
        ),
        (
            (HA,),
            {"tensor_model_parallel_size": 3},
            "4 ranks cannot be divided among these sizes: --tensor-model-parallel-size 3 times "
            "--pipeline-model-parallel-size 1 times --context-parallel-size 1 is 3, which does not "
            "divide 4",
        ),
        (
            (HA,),
            {"world_size": 6, **EXPERTS, "expert_tensor_parallel_size": 2},
            "6 ranks cannot be divided among these sizes: --expert-model-parallel-size 2 times "
            "--expert-tensor-parallel-size 2 times --pipeline-model-parallel-size 1 is 4, which "
            "does not divide 6",
        ),
        (
            (HA,),
            {"world_size": 2, "tensor_model_parallel_size": 2},
            "with 2 ranks, data-parallel times context-parallel size is 1, so no state has a copy. "
            "Choose sizes with which it is 2 or more. To train without copies, give "
            "--use-distributed-optimizer and --distributed-optimizer-no-replica: lost state then "
            "comes back from the newest checkpoint",
        ),
        (
            (HA,),
            {"pipeline_model_parallel_size": 4, "sequence_parallel": True, **DISTRIBUTED},
            "with 4 ranks, data-parallel times context-parallel size is 1, so no state has a copy. "
            "Choose sizes with which it is 2 or more. To train without copies, give "
            "--use-distributed-optimizer and --distributed-optimizer-no-replica: lost state then "
            "comes back from the newest checkpoint",
        ),
        (
            (HA,),
            {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": None},
            "with 4 ranks, the experts' data-parallel size is 1, so no expert has a copy. Choose "
            "sizes with which it is 2 or more, for example a smaller --expert-model-parallel-size. "
            "To train without copies, give --distributed-optimizer-no-replica: lost state then "
            "comes back from the newest checkpoint",
        ),
        (
            (HA, "--optimizer-replica-num", "3"),
            DISTRIBUTED,
            "data-parallel times context-parallel size is 4, which cannot be divided by "
            "--optimizer-replica-num 3: each shard of the optimizer must be on equally many ranks",
        ),
        (
            (HA, "--optimizer-replica-num", "4"),
            {"world_size": 8, **EXPERTS, "tensor_model_parallel_size": 2, **DISTRIBUTED},
            "the experts' data-parallel size is 2, which cannot be divided by "
            "--optimizer-replica-num 4: each shard of the optimizer must be on equally many ranks",
        ),
        (
            (HA, "--optimizer-replica-num", "2"),
            {},
            "--optimizer-replica-num is 2, but without --use-distributed-optimizer every rank of a "
            "data-parallel group, here 4, holds the whole optimizer: give 4, or remove the number",
        ),
        (
            (HA, "--optimizer-replica-num", "3"),
            {},
            "--optimizer-replica-num is 3, but without --use-distributed-optimizer every rank of a "
            "data-parallel group, here 4, holds the whole optimizer: give 4, or remove the number",
        ),
        (
            (HA, "--optimizer-replica-num", "1"),
            DISTRIBUTED,
            "--optimizer-replica-num is 1; expected is 2 or more, or "
            "--distributed-optimizer-no-replica for no copies",
        ),
        (
            (HA,),
            {"num_distributed_optimizer_instances": 4, **DISTRIBUTED},
            "--num-distributed-optimizer-instances is 4, but --optimizer-replica-num is 2: each "
            "instance has one copy, so give --optimizer-replica-num 4",
        ),
        (
            (HA, "--distributed-optimizer-no-replica"),
            {"num_distributed_optimizer_instances": 2, **DISTRIBUTED},
            "--num-distributed-optimizer-instances is 2, each with a copy, but "
            "--distributed-optimizer-no-replica asks for no copies: remove one of the two",
        ),
        (
            (HA,),
            {"swap_optimizer": True},
            "--swap-optimizer cannot be used with --enable-high-availability: it moves optimizer "
            "state out of the device between steps, and such state cannot be copied from one rank "
            "to another. Remove one of the two",
        ),
        (
            (HA,),
            {"optimizer_cpu_offload": True},
            "--optimizer-cpu-offload cannot be used with --enable-high-availability: it splits the "
            "optimizer between device and host, and such state cannot be copied from one rank to "
            "another. Remove one of the two",
        ),
    ],
)
def test_impossible_arguments_are_refused_with_given_and_expected_values(
    words: tuple[str, ...], others: dict[str, object], sentence: str
) -> None:
    """When arguments contradict each other, or leave state without a replica, then the message
    gives the given and the expected values."""
    with pytest.raises(UsageError) as refused:
        check(parsed(*words, **others))
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", ["use_custom_fsdp", "use_megatron_fsdp", "use_torch_fsdp2"])
def test_wrappers_other_than_megatrons_ddp_are_refused(name: str) -> None:
    """When a model is not wrapped by Megatron's DistributedDataParallel, then it is refused, with
    and without elastic training."""
    flag = "--" + name.replace("_", "-")
    for words in ((HA,), (HA, "--enable-elastic-training")):
        with pytest.raises(
            UsageError, match=f"^{flag} cannot be used with {HA}: the adaptor supports"
        ):
            check(parsed(*words, **DISTRIBUTED, **{name: True}))


def test_master_parameters_in_parameter_memory_are_refused() -> None:
    """When master parameters are kept in the memory of the parameters, then this is refused, with
    and without elastic training."""
    for words in ((HA,), (HA, "--enable-elastic-training")):
        with pytest.raises(UsageError, match=r"^--reuse-fp32-param cannot be used with"):
            check(parsed(*words, **DISTRIBUTED, reuse_fp32_param=True))


@pytest.mark.parametrize(
    ("more", "others", "sentence"),
    [
        ((), {}, "--enable-elastic-training needs --use-distributed-optimizer"),
        (
            ("--distributed-optimizer-no-replica",),
            DISTRIBUTED,
            "--enable-elastic-training needs copies of the optimizer state on other ranks, and",
        ),
        ((), {**DISTRIBUTED, "world_size": 1}, "with 1 ranks, data-parallel times"),
        (
            (),
            {**DISTRIBUTED, "world_size": 2, **EXPERTS},
            "with 2 ranks, the experts' data-parallel size",
        ),
        (
            (),
            {**DISTRIBUTED, **EXPERTS},
            "--enable-elastic-training removes ranks by their place in the data-parallel group "
            "only, and --expert-model-parallel-size is 2: it must be 1",
        ),
        (
            (),
            {**DISTRIBUTED, "context_parallel_size": 2},
            "--enable-elastic-training removes ranks by their place in the data-parallel group "
            "only, and --context-parallel-size is 2: it must be 1",
        ),
        ((), DISTRIBUTED, "this version cannot go on with fewer ranks of a Megatron job: take"),
    ],
)
def test_elastic_training_is_refused_after_its_arguments_are_checked(
    more: tuple[str, ...], others: dict[str, object], sentence: str
) -> None:
    """When elastic training is requested, then conflicting arguments are refused first. When all
    arguments fit, the message says that this version does not support elastic training."""
    with pytest.raises(UsageError) as refused:
        check(parsed(HA, "--enable-elastic-training", *more, **others))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ((HA,), {}),
        ((HA,), DISTRIBUTED),
        ((HA,), {"bf16": True, "overlap_grad_reduce": True, **DISTRIBUTED}),
        ((HA,), {"world_size": 2, "context_parallel_size": 2, **DISTRIBUTED}),
        ((HA,), {**DISTRIBUTED, **EXPERTS, "expert_tensor_parallel_size": 1}),
        ((HA, "--distributed-optimizer-no-replica"), {"world_size": 1, **DISTRIBUTED}),
        ((HA, "--optimizer-replica-num", "4"), DISTRIBUTED),
        ((HA,), {"use_dist_ckpt": True}),
        ((HA,), {"swap_attention": True, "lora_target_modules": ["linear_qkv"]}),
        ((HA,), {"disable_gloo_group": True, "enable_gloo_process_groups": False}),
        ((), {"world_size": 1, "use_megatron_fsdp": True, "swap_optimizer": True}),
        ((HA, "--distributed-optimizer-no-replica", "--optimizer-replica-num", "1"), DISTRIBUTED),
    ],
)
def test_valid_arguments_are_accepted(words: tuple[str, ...], others: dict[str, object]) -> None:
    """When all state has a replica, or the arguments request no replicas, or high availability is
    off, then the arguments are accepted."""
    check(parsed(*words, **others))


# --------------------------------------------------------------- the documentation of the arguments


def test_every_argument_and_word_is_on_the_pages() -> None:
    """When an argument or a word is added, renamed or refused, then the pages document it."""
    parser = add_arguments(ArgumentParser(add_help=False))
    flags = [action.option_strings[0] for action in parser._actions]
    refused = [arguments._flag(name) for name in (*arguments._FSDP, *arguments._ELSEWHERE)]
    taken = [*arguments._NEEDED, *arguments._SIZES]
    expected = [*flags, *refused, *taken, *arguments._OF_WORDS, *REFUSED]
    assert [each for each in expected if f"`{each}" not in PAGES] == []
