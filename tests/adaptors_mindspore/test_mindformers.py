"""Read the configuration files of MindSpore Transformers, with the examples of their
documentation."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tft_mindspore.mindformers import Recipe, Sizes, read_recipe

from tft.errors import UsageError
from tft.placement.layout import Layout, Scheme, topology

MINDSPORE = Scheme(name="MindSpore", cuts_parameters=True, experts_as_dense=True)

FIRST = """\
output_dir: './output'
load_checkpoint: ''
src_strategy_path_or_dir: '/output/strategy/'
only_save_strategy: False
resume_training: False
run_mode: 'train'
runner_config:
  epochs: 2
  sink_mode: True
  sink_size: 1
callbacks:
  - type: MFLossMonitor
  - type: CheckpointMonitor
    prefix: "llama2_13b"
    save_checkpoint_steps: 100
    integrated_save: False
    async_save: False
parallel:
  parallel_mode: 1
  enable_parallel_optimizer: False
  strategy_ckpt_save_file: "./ckpt_strategy.ckpt"
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 1
"""

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


def recipe(directory: Path, **changes: str) -> Recipe:
    """
    Write the example configuration with some lines replaced, and read it.

    The keys of `changes` are the first words of the lines to replace.
    """
    lines = []
    for line in FIRST.splitlines():
        bare = line.lstrip(" -")
        key = bare.partition(":")[0]
        if key in changes:
            line = line[: len(line) - len(bare)] + changes.pop(key)
        lines.append(line)
    assert not changes
    file = directory / "pretrain.yaml"
    file.write_text("\n".join(lines) + "\n")
    return read_recipe(file)


def cut(shards: int) -> str:
    """
    Return the configuration lines that enable a parallel optimizer with `shards` shards.
    """
    return (
        "enable_parallel_optimizer: True\n  parallel_optimizer_config:\n"
        f"    optimizer_weight_shard_size: {shards}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "enable_parallel_optimizer": cut(2),
            "data_parallel": "data_parallel: 4",
            "model_parallel": "model_parallel: 2",
        },
        {
            "enable_parallel_optimizer": cut(4),
            "data_parallel": "data_parallel: 8",
            "model_parallel": "model_parallel: 1",
        },
    ],
    ids=["without the optimizer parallelism", "with the optimizer parallelism", "llama2 13B"],
)
def test_the_documented_examples_give_the_documented_replicas(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    """When a file is an example of the documentation of MindSpore Transformers, then rank R and
    rank R + 4 of its 8 are replicas."""
    sizes = recipe(tmp_path, **changes).sizes
    assert sizes.world == 8
    assert sizes.replicas() == PAIRS


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"enable_parallel_optimizer": cut(2)},
            "no replica: 2 different parts of the state (optimizer_weight_shard_size 2 * "
            "expert_parallel 1) are held once each by the 2 ranks of a data-parallel group "
            "(data_parallel 2 * context_parallel 1); set parallel_config.data_parallel to 4 or "
            "parallel.enable_parallel_optimizer to False",
        ),
        (
            {"data_parallel": "data_parallel: 1"},
            "no replica: a data-parallel group has 1 rank (data_parallel 1 * context_parallel "
            "1), and no other rank holds the same state; set parallel_config.data_parallel to 2",
        ),
        (
            {"pipeline_stage": "expert_parallel: 2"},
            "no replica: 2 different parts of the state (optimizer_weight_shard_size 1 * "
            "expert_parallel 2) are held once each by the 2 ranks of a data-parallel group "
            "(data_parallel 2 * context_parallel 1); set parallel_config.data_parallel to 4",
        ),
        (
            {"enable_parallel_optimizer": cut(-1)},
            "no replica: parallel.parallel_optimizer_config.optimizer_weight_shard_size is -1, so "
            "each parameter is cut over the whole of its data-parallel group of 2 ranks; set "
            "parallel_config.data_parallel to 4 and "
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size to 2 or "
            "parallel.enable_parallel_optimizer to False",
        ),
        (
            {"data_parallel": "data_parallel: 1000000"},
            "a job has at most 1000000 ranks, not 4000000",
        ),
        (
            {"sink_size": "sink_size: 2"},
            "runner_config.sink_size is 2; expected is 1: with another value MindSpore runs "
            "several steps as one unit, so tft cannot know in which step a fault came, and after a "
            "fault the ranks could have the states of different steps",
        ),
        (
            {"sink_size": "sink_size: -1"},
            "runner_config.sink_size is -1; expected is 1: with another value MindSpore runs "
            "several steps as one unit, so tft cannot know in which step a fault came, and after a "
            "fault the ranks could have the states of different steps",
        ),
        (
            {"only_save_strategy": "only_save_strategy: True"},
            "only_save_strategy is True; expected is False: the run would end before it trains a "
            "step",
        ),
        (
            {"resume_training": "resume_training: True"},
            "resume_training is True; a load_checkpoint from which to continue is expected with it",
        ),
        (
            {"integrated_save": "integrated_save: True"},
            "callbacks[1].integrated_save is True; expected is False: parameters cannot be "
            "gathered for a last checkpoint from ranks that are gone",
        ),
        (
            {"prefix": "prefix: 7"},
            "callbacks[1].prefix is 7; expected is a text",
        ),
        (
            {"output_dir": "output_dir: [a]"},
            "output_dir is ['a']; expected is a text",
        ),
        (
            {"strategy_ckpt_save_file": "strategy_ckpt_save_file: True"},
            "parallel.strategy_ckpt_save_file is True; expected is a text",
        ),
        (
            {"resume_training": "resume_training: 1"},
            "resume_training is 1; expected is True or False",
        ),
    ],
)
def test_an_unrecoverable_configuration_is_refused_with_the_settings_to_change(
    tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    """When a job with this file could not be recovered, then the error gives the reason and the
    settings to change."""
    with pytest.raises(UsageError) as refused:
        recipe(tmp_path, **changes)
    assert str(refused.value) == f"{tmp_path / 'pretrain.yaml'}: {sentence}"


def test_callbacks_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    """When `callbacks` is not a list, then the error says what is expected."""
    file = tmp_path / "x.yaml"
    file.write_text("parallel_config: {data_parallel: 2}\ncallbacks: CheckpointMonitor\n")
    with pytest.raises(UsageError, match="'CheckpointMonitor'; expected is a list of mappings"):
        read_recipe(file)


def test_the_sink_size_is_ignored_without_data_sinking(tmp_path: Path) -> None:
    """When data sinking is off, then steps end one by one, for any sink size."""
    recipe(tmp_path, sink_mode="sink_mode: False", sink_size="sink_size: 4")


def test_the_directories_of_checkpoints_and_strategies_are_read(tmp_path: Path) -> None:
    """When a file names the directories of checkpoints and strategies, then they are used. Missing
    values have the defaults of MindSpore Transformers."""
    first = recipe(tmp_path)
    assert first.checkpoints == Path("output/checkpoint")
    assert (first.prefix, first.load, first.resume) == ("llama2_13b", None, False)
    assert first.strategy == Path("/output/strategy")
    assert first.strategy_file == Path("ckpt_strategy.ckpt")
    again = recipe(
        tmp_path,
        load_checkpoint="load_checkpoint: './output/checkpoint/'",
        resume_training="resume_training: True",
    )
    assert (again.load, again.resume, again.resume_file) == (Path("output/checkpoint"), True, None)
    named = recipe(
        tmp_path,
        load_checkpoint="load_checkpoint: './output/checkpoint/'",
        resume_training="resume_training: llama2_13b_rank_0-5_1.ckpt",
    )
    assert (named.resume, named.resume_file) == (True, "llama2_13b_rank_0-5_1.ckpt")

    file = tmp_path / "short.yaml"
    file.write_text("parallel_config: {data_parallel: 2}\ncallbacks: [{type: CheckpointMonitor}]\n")
    assert read_recipe(file) == Recipe(sizes=Sizes(dp=2), prefix="CKP")
    file.write_text("parallel_config: {data_parallel: 2}\n")
    assert read_recipe(file) == Recipe(sizes=Sizes(dp=2))


def test_the_newer_setting_of_the_strategy_directory_is_read(tmp_path: Path) -> None:
    """When a file has the newer setting for the strategy's directory, then it is used."""
    newer = "strategy_ckpt_config:\n    save_file: './s.ckpt'"
    assert recipe(tmp_path, strategy_ckpt_save_file=newer).strategy_file == Path("s.ckpt")


several = st.integers(1, 4)


@settings(deadline=None)  # a file is written and read several times
@given(dp=st.integers(1, 12), shards=st.sampled_from([-1, 1, 2, 3, 4, 8, 10**12]), ep=several)
def test_each_proposed_setting_makes_the_configuration_recoverable(
    tmp_path_factory: pytest.TempPathFactory, dp: int, shards: int, ep: int
) -> None:
    """When a file leaves state without a replica, then each proposed setting gives that state a
    replica."""
    root = tmp_path_factory.getbasetemp()
    optimizer = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"

    def attempt(dp: int, shards: int, *, is_cut: bool = True) -> Recipe:
        return recipe(
            root,
            data_parallel=f"data_parallel: {dp}",
            pipeline_stage=f"expert_parallel: {ep}",
            enable_parallel_optimizer=cut(shards if is_cut else 1).replace("True", str(is_cut)),
        )

    try:
        attempt(dp, shards)
    except UsageError as refused:
        said = str(refused).partition("; set ")[2]
        assert said
        if match := re.search(r"data_parallel to (\d+)", said):
            both = f"{match[0]} and {optimizer} to 2" in said
            attempt(int(match[1]), 2 if both else shards)
        elif match := re.search(rf"{optimizer} to ([\d, or]+\d)", said):
            for number in re.findall(r"\d+", match[1]):
                attempt(dp, int(number))
        if "enable_parallel_optimizer to False" in said:
            attempt(dp, shards, is_cut=False)


few = st.integers(1, 3)


@given(copies=st.integers(2, 3), shards=few, ep=few, cp=few, tp=few, pp=few)
def test_replicas_are_the_ranks_that_hold_the_same_shards(
    copies: int, shards: int, ep: int, cp: int, tp: int, pp: int
) -> None:
    """When two ranks are replicas of each other, then tft's placement gives both the same shards.
    Ranks with the same shards are replicas of each other."""
    sizes = Sizes(dp=copies * shards * ep, tp=tp, pp=pp, cp=cp, ep=ep, shards=shards)
    layout = Layout(dp=sizes.dp, tp=tp, pp=pp, cp=cp, ep=ep, shards=shards, scheme=MINDSPORE)
    held: dict[int, set[str]] = {rank: set() for rank in range(sizes.world)}
    for shard, ranks in topology(layout).groups.items():
        for rank in ranks:
            held[rank].add(shard)
    same: dict[frozenset[str], list[int]] = {}
    for rank, shards_of in held.items():
        same.setdefault(frozenset(shards_of), []).append(rank)

    assert sizes.replicas() == tuple(sorted(tuple(ranks) for ranks in same.values()))


def test_checked_norm_is_read_for_the_callback(tmp_path: Path) -> None:
    """When a file checks the norm of the gradients, then the recipe has the keys that the callback
    takes. A file without the check has none, and a threshold that is no number is refused."""
    file = tmp_path / "more.yaml"
    monitor = "monitor_config:\n  monitor_on: True\n  check_for_global_norm: {}\n"
    threshold = "  global_norm_spike_threshold: {}\n"
    file.write_text(FIRST + monitor.format(True) + threshold.format(3.0))
    assert read_recipe(file).monitor_config == {
        "check_for_global_norm": True, "global_norm_spike_threshold": 3.0,
    }  # fmt: skip
    file.write_text(FIRST + monitor.format(False) + threshold.format(3.0))
    assert read_recipe(file).monitor_config == {}
    file.write_text(FIRST + monitor.format(True) + threshold.format("null"))
    with pytest.raises(UsageError, match=r"monitor_config.global_norm_spike_threshold is None"):
        read_recipe(file)
