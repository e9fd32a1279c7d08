"""
`tft replicas` with sizes, and with a file of MindSpore Transformers.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tft.cli.replicas import read_layout, replicas_command
from tft.errors import UsageError
from tft.placement.layout import Layout, Scheme

MINDSPORE = Scheme(name="MindSpore", cuts_parameters=True, experts_as_dense=True)

PRETRAIN = """\
seed: 0
output_dir: './output' # path to save checkpoint/strategy
run_mode: 'train'

runner_config:
  epochs: 2
  batch_size: 4
  sink_mode: True
  sink_size: 1

optimizer:
  type: AdamW
  betas: [0.9, 0.95]
  eps: 1.e-8

train_dataset: &train_dataset
  data_loader:
    type: MindDataset
    dataset_dir: ""
train_dataset_task:
  type: CausalLanguageModelDataset
  dataset_config: *train_dataset

use_parallel: True
# parallel context config
parallel:
  parallel_mode: 1 # 0-data parallel, 1-semi-auto parallel, 2-auto parallel, 3-hybrid parallel
  gradients_mean: False
  full_batch: True
  search_mode: "sharding_propagation"
  enable_parallel_optimizer: True
  strategy_ckpt_save_file: "./ckpt_strategy.ckpt"
  parallel_optimizer_config:
    gradient_accumulation_shard: False
    parallel_optimizer_threshold: 64
    optimizer_weight_shard_size: 4
# default parallel of device num = 16 for Atlas 800T A2
parallel_config:
  data_parallel: &dp 8
  model_parallel: 1
  pipeline_stage: 1
  use_seq_parallel: False
  micro_batch_num: 1
  vocab_emb_dp: True
  gradient_aggregation_group: 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """
    Write a configuration file in the form of MindSpore Transformers.
    """
    file = tmp_path / "pretrain.yaml"
    file.write_text(PRETRAIN)
    return file


def replicas(*arguments: str | Path) -> str:
    """
    Return the output of `tft replicas`.
    """
    ended = CliRunner().invoke(replicas_command(), list(map(str, arguments)), standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception
    assert ended.return_value == 0
    return ended.output


def as_json(*arguments: str | Path) -> Any:  # Any: whatever json.loads gives
    """
    Return the JSON output of `tft replicas`.
    """
    return json.loads(replicas("--json", *arguments))


def test_replicas_prints_holders_losses_and_costs_of_a_small_job() -> None:
    """When the sizes of a small job are given, then the command prints the holders of each state,
    the losses that are survivable, and the memory cost."""
    said = replicas(
        *("--dp", "8", "--optimizer-shards", "4", "--ranks-per-node", "4", "--parameters", "7B")
    )
    assert (
        said
        == """\
8 ranks: dp 8, tp 1, pp 1, cp 1, ep 1; counted tp-cp-ep-dp-pp

Who holds what:
  dense: parameters; 1 shard, 8 copies of each
    dense: [0, 1, 2, 3, 4, 5, 6, 7]
  optimizer: optimizer state; 4 shards, 2 copies of each
    optimizer.0: [0, 4]
    optimizer.1: [1, 5]
    optimizer.2: [2, 6]
    optimizer.3: [3, 7]

What can be lost:
  any one rank: yes, everything it holds is on another rank or node, too
  any two ranks: all but 4 pairs that have all copies of something, as 0 and 4 have of optimizer.0:
    ranks 0-3, each with the rank 4 further on
  any one of 2 nodes of 4 ranks: yes, everything it holds is on another rank or node, too
  any two nodes: all but 1 pair that has all copies of something, as 0 and 1 have of dense:
    nodes 0 and 1

Bytes per parameter and rank, with Adam and parameters in fp16 or bf16:
  gradients in fp16/bf16: 4 + 32/8 = 8, 2 of them for the copies
  gradients in fp32: 6 + 24/8 = 9, 1.5 of them for the copies
Of a model of 7e+09 parameters, a rank has:
  gradients in fp16/bf16: 56 GB, 14 GB of them for the copies
  gradients in fp32: 63 GB, 10.5 GB of them for the copies

For each rank, who holds a copy of what it holds with the fewest copies:
rank:0, report group list: [0, 4]
rank:1, report group list: [1, 5]
rank:2, report group list: [2, 6]
rank:3, report group list: [3, 7]
rank:4, report group list: [0, 4]
rank:5, report group list: [1, 5]
rank:6, report group list: [2, 6]
rank:7, report group list: [3, 7]
"""
    )


@pytest.mark.parametrize(
    ("sizes", "sentences"),
    [
        (
            "--dp 2 --tp 4 --nodes 2",
            [
                (
                    "  any one of 2 nodes of 4 ranks: yes, everything it holds is on another rank "
                    "or node, too"
                )
            ],
        ),
        (
            "--dp 2 --tp 4 --nodes 1",
            [
                "  any one of 1 node of 8 ranks: no, not node 0; node 0 has all copies of "
                "dense.tensor0"
            ],
        ),
        (
            "--dp 2 --tp 3 --order dp-cp-ep-tp-pp --ranks-per-node 2",
            ["of 2 ranks: no, not nodes 0-2; node 0 has all copies of dense.tensor0"],
        ),
        ("--dp 6 --optimizer-shards 2", ["any two ranks: yes, everything they hold is on a third"]),
        ("--dp 4 --nodes 4", ["any two nodes: yes, everything they hold is on a third, too"]),
        (
            "--dp 2 --pp 20 --nodes 4",
            [
                "    dense.stage7: [14, 15]\n    … 12 more\n",
                "    ranks 0, 2, 4, 6, 8, 10, 12, 14, … 12 more, each with the rank 1 further on",
            ],
        ),
        (
            "--dp 100 --optimizer-shards 4",
            ["[0, 1, 2, 3, 4, 5, 6, 7, … 92 more]", "… 36 more lines; --all shows them"],
        ),
        (
            "--dp 8 --ep 4 --optimizer-shards 4 --parameters 350M --expert-parameters 3e8",
            [
                "  expert: parameters of experts; 4 shards, 2 copies of each",
                "  expert_optimizer: optimizer state of experts; 4 shards, 2 copies of each",
                "  experts, gradients in fp16/bf16: 20, 8 of them for the copies",
                "  dense, gradients in fp32: 6 + 24/8 = 9, 1.5 of them for the copies",
                "  gradients in fp16/bf16: 1.9 GB, 0.7 GB of them for the copies",
            ],
        ),
    ],
)
def test_replicas_prints_the_sentence_for_each_answer(sizes: str, sentences: list[str]) -> None:
    """When the sizes lead to different answers, then the output has the sentence for each answer.
    Long lists are shortened."""
    said = replicas(*sizes.split())
    for sentence in sentences:
        assert sentence in said


def test_all_option_shows_the_complete_lists() -> None:
    """When `--all` is given, then no list is shortened."""
    said = replicas("--dp", "2", "--pp", "50", "--all")
    assert "more" not in said
    assert "optimizer.stage49: [98, 99]" in said
    assert "rank:99, report group list: [98, 99]" in said


def test_json_option_prints_the_same_facts_by_name() -> None:
    """When `--json` is given, then groups, losses and bytes are in the output under their names."""
    said = as_json(
        *(
            "--dp",
            "4",
            "--tp",
            "2",
            "--optimizer-shards",
            "2",
            "--nodes",
            "4",
            "--parameters",
            "1e9",
        )
    )
    assert said["states"][1]["groups"]["optimizer.tensor1.0"] == [1, 5]
    assert said["ranks"] == {
        "any_one": True,
        "any_two": False,
        "not_alone": [],
        "not_together": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert said["nodes"]["ranks_per_node"] == 2
    assert said["nodes"]["not_together"] == [[0, 2], [1, 3]]
    assert said["bytes_per_parameter"]["fp32"] == {
        "dense": {"formula": "6 + 24/4", "total": 12.0, "for_copies": 3.0}
    }
    assert said["bytes_per_rank"]["fp16/bf16"] == {"total": 6e9, "for_copies": 2e9}


def test_sizes_are_read_from_a_mindspore_transformers_file(recipe: Path) -> None:
    """When a file of MindSpore Transformers is given, then the sizes are read from it. Parameters
    are cut with their optimizer state, and small parameters are kept whole."""
    assert read_layout(recipe) == Layout(dp=8, shards=4, threshold_kb=64, scheme=MINDSPORE)
    said = replicas("--yaml", recipe, "--nodes", "2")
    assert "optimizer: parameters with their optimizer state; 4 shards, 2 copies of each" in said
    assert "small: parameters of less than 64 KB, with their optimizer state; 1 shard" in said
    assert "MindSpore cuts the parameters, too, and needs less" in said
    assert "rank:4, report group list: [0, 4]\n" in said


@pytest.mark.parametrize(
    ("was", "becomes", "layout"),
    [
        (
            "enable_parallel_optimizer: True",
            "enable_parallel_optimizer: False",
            Layout(dp=8, scheme=MINDSPORE),
        ),
        (
            "    parallel_optimizer_threshold: 64\n",
            "",
            Layout(dp=8, shards=4, scheme=MINDSPORE, threshold_kb=64),
        ),
        (
            "parallel_optimizer_threshold: 64",
            "parallel_optimizer_threshold: 0",
            Layout(dp=8, shards=4, scheme=MINDSPORE),
        ),
        (
            "  pipeline_stage: 1\n",
            "  pipeline_stage: 2\n  context_parallel: 2\n  expert_parallel: 2\n",
            Layout(dp=8, pp=2, cp=2, ep=2, shards=4, scheme=MINDSPORE, threshold_kb=64),
        ),
        (
            "  enable_parallel_optimizer: True\n",
            "",
            Layout(dp=8, scheme=MINDSPORE),
        ),
    ],
)
def test_missing_key_of_a_mindspore_file_has_the_default(
    recipe: Path, was: str, becomes: str, layout: Layout
) -> None:
    """When a key is missing from a MindSpore Transformers file, then MindSpore's default is used.
    When the key has another value, that value is used."""
    assert was in PRETRAIN
    recipe.write_text(PRETRAIN.replace(was, becomes))
    assert read_layout(recipe) == layout


def test_older_optimizer_shard_key_is_read(recipe: Path) -> None:
    """When an older file has `optimizer_shard` instead of `enable_parallel_optimizer`, then the
    optimizer is cut into shards."""
    older = PRETRAIN.replace("  enable_parallel_optimizer: True\n", "")
    recipe.write_text(older + "  optimizer_shard: True\n")
    assert read_layout(recipe).shards == 4


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        (
            "data_parallel: &dp 8",
            "data_parallel: auto",
            "parallel_config.data_parallel is 'auto'; expected is a whole number of 1 or more",
        ),
        (
            "model_parallel: 1",
            "model_parallel: True",
            "parallel_config.model_parallel is True; expected is a whole number of 1 or more",
        ),
        (
            "pipeline_stage: 1",
            "pipeline_stage:",
            "parallel_config.pipeline_stage is empty; expected is a whole number of 1 or more",
        ),
        (
            "  data_parallel: &dp 8\n",
            "",
            "parallel_config.data_parallel is missing; expected is a whole number of 1 or more",
        ),
        (
            "parallel_config:\n",
            "sizes:\n",
            "parallel_config is missing; expected is the sizes of the parallelism",
        ),
        (
            "enable_parallel_optimizer: True",
            "enable_parallel_optimizer: 1",
            "parallel.enable_parallel_optimizer is 1; expected is True or False",
        ),
        (
            "optimizer_weight_shard_size: 4",
            "optimizer_weight_shard_size: -2",
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size is -2; expected is a "
            "whole number of 1 or more, or -1",
        ),
        (
            "parallel_optimizer_threshold: 64",
            "parallel_optimizer_threshold: 64KB",
            "parallel.parallel_optimizer_config.parallel_optimizer_threshold is '64KB'; expected "
            "is a whole number of 0 or more",
        ),
        (
            "    optimizer_weight_shard_size: 4\n",
            "",
            "no replica: parallel.parallel_optimizer_config.optimizer_weight_shard_size is not "
            "given, so each parameter is cut over the whole of its data-parallel group of 8 ranks; "
            "set parallel.parallel_optimizer_config.optimizer_weight_shard_size to 2 or 4 or "
            "parallel.enable_parallel_optimizer to False",
        ),
        (
            "optimizer_weight_shard_size: 4",
            "optimizer_weight_shard_size: 8",
            "no replica: 8 different parts of the state (optimizer_weight_shard_size 8 * "
            "expert_parallel 1) are held once each by the 8 ranks of a data-parallel group "
            "(data_parallel 8 * context_parallel 1); set parallel_config.data_parallel to 16, "
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size to 2 or 4 or "
            "parallel.enable_parallel_optimizer to False",
        ),
        (
            "data_parallel: &dp 8",
            "data_parallel: &dp 2",
            "no replica: 4 different parts of the state (optimizer_weight_shard_size 4 * "
            "expert_parallel 1) cannot be given evenly to the 2 ranks of a data-parallel group "
            "(data_parallel 2 * context_parallel 1); set parallel_config.data_parallel to 8 or "
            "parallel.enable_parallel_optimizer to False",
        ),
    ],
)
def test_wrong_value_in_a_mindspore_file_is_refused_with_the_key(
    recipe: Path, was: str, becomes: str, sentence: str
) -> None:
    """When a key of the file is missing or wrong, or the sizes leave no replica, then the file is
    refused. The sentence names the file, the key and the expected value."""
    assert was in PRETRAIN
    recipe.write_text(PRETRAIN.replace(was, becomes))
    with pytest.raises(UsageError) as refused:
        read_layout(recipe)
    assert str(refused.value) == f"{recipe}: {sentence}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"parallel_config: {",
            " is not YAML: while parsing a flow node expected the node content",
        ),
        (b"began: 2026-13-32", " is not YAML: month must be in 1..12"),
        (b"\xff\xfe\x00", " is not YAML: "),
        (b"a: !!python/name:os.system", " is not YAML: could not determine a constructor"),
        (b"", " is empty; expected is a mapping with parallel_config"),
        (b"[1, 2]", " is [1, 2]; expected is a mapping with parallel_config"),
        (b"parallel_config: [8]", ": parallel_config is [8]; expected is a mapping"),
    ],
)
def test_file_that_is_not_a_yaml_mapping_is_refused(
    recipe: Path, content: bytes, sentence: str
) -> None:
    """When the file is not YAML, is empty, or has no mapping, then the file is refused and one
    sentence gives its content or the reason."""
    recipe.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_layout(recipe)
    assert str(refused.value).startswith(f"{recipe}{sentence}")
    assert "\n" not in str(refused.value)


def test_missing_pyyaml_is_reported_with_the_package_to_install(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When PyYAML is not installed, then reading a file is refused and the sentence names the
    package to install."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"PyYAML is needed: pip install 'tft-bus\[yaml\]'"):
        read_layout(recipe)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--dp 2 --optimizer-shards 2", "no replica: a dense data-parallel group has 2 ranks"),
        ("", "no replica: a dense data-parallel group has 1 rank"),
        ("--yaml nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        (
            "--yaml x.yaml --dp 1",
            "--dp cannot be used together with --yaml, because the file has this value already",
        ),
        (
            "--yaml x.yaml --optimizer-shards 2",
            "--optimizer-shards cannot be used together with --yaml, because the file has this "
            "value already",
        ),
        ("--dp 8 --nodes 3", "8 ranks cannot be spread evenly over --nodes 3"),
        ("--dp 8 --nodes 0", "8 ranks cannot be spread evenly over --nodes 0"),
        ("--dp 8 --ranks-per-node 0", "8 ranks do not fill nodes of 0 ranks each"),
        ("--dp 8 --nodes 2 --ranks-per-node 4", "--ranks-per-node and --nodes exclude each other"),
        ("--dp 2 --order tp", "the order of the dimensions must name each of"),
        ("--dp 4 --ep 2 --parameters 1e9", "--parameters also needs --expert-parameters"),
        ("--dp 4 --expert-parameters 1e9", "--expert-parameters must be at most --parameters"),
    ],
)
def test_replicas_refuses_sizes_that_have_no_answer(arguments: str, sentence: str) -> None:
    """When the sizes have no answer, then the command is refused and one sentence gives the reason."""
    with pytest.raises(UsageError) as refused:
        replicas(*arguments.split())
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("amount", ["many", "-1", "nan", "inf", "B", ""])
def test_invalid_number_of_parameters_is_refused(amount: str) -> None:
    """When `--parameters` is not a valid number, then the command exits with 2 and shows examples
    of a valid number."""
    ended = CliRunner().invoke(replicas_command(), ["--dp", "2", "--parameters", amount])
    assert ended.exit_code == 2
    assert f"{amount!r} is not a number of parameters, such as 13e9, 13B or 350M" in ended.output


def tft(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """
    Run the installed command.
    """
    return subprocess.run(
        [sys.executable, "-m", "tft", "replicas", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_replicas_exits_with_0_or_2(recipe: Path) -> None:
    """When the replicas command has an answer, then it exits with 0. When the sizes leave no
    replica, it exits with 2 and one sentence."""
    answered = tft("--yaml", recipe)
    assert (answered.returncode, answered.stderr) == (0, "")
    assert "ranks 0-3, each with the rank 4 further on" in answered.stdout
    refused = tft("--dp", "2", "--optimizer-shards", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("tft: no replica: ")
    assert refused.stderr.count("\n") == 1


def test_replicas_imports_no_yaml_torch_or_zmq() -> None:
    """When sizes are given as options, then the replicas command imports neither PyYAML nor torch
    nor zmq."""
    script = (
        "import sys; sys.argv = ['tft', 'replicas', '--dp', '2']\n"
        "from tft.cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('yaml', 'torch', 'zmq') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"
