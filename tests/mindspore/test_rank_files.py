"""
Tests of MindSpore's own checkpoint files in the directories and with the names that tft gives them.
"""

from functools import partial
from pathlib import Path

import mindspore
import numpy
import pytest
from mindspore import nn, train
from tft_mindspore.layout import Series, find, open_series, savers
from tft_mindspore.mindformers import Sizes
from tft_mindspore.rank_files import damage


def layer(value: float) -> nn.Cell:
    """
    Return a layer whose parameters all have this value.
    """
    made = nn.Dense(4, 3)
    for parameter in made.get_parameters():
        parameter.copy_(mindspore.Tensor(numpy.full(parameter.shape, value, numpy.float32)))
    return made


def save(cell: nn.Cell, path: Path) -> None:
    """
    Save the parameters of `cell` with MindSpore's own function.
    """
    mindspore.save_checkpoint(cell, str(path))


@pytest.mark.parametrize(
    ("options", "unseen"),
    [({}, 1), ({"crc_check": True}, 2), ({"format": "safetensors"}, 0)],
    ids=["plain", "with a checksum", "safetensors"],
)
def test_a_truncated_file_of_mindspore_is_detected(
    tmp_path: Path, options: dict[str, bool | str], unseen: int
) -> None:
    """When a file of MindSpore's is whole, then the check accepts it. When the file is truncated,
    then that is detected, except for a .ckpt that ends between two of its parameters, or before its
    checksum."""
    path = tmp_path / f"a-1_1.{options.get('format', 'ckpt')}"
    mindspore.save_checkpoint(layer(1.0), str(path), **options)
    content = path.read_bytes()
    assert damage(path, thoroughly=True) == ""
    path.chmod(0o600)
    for end in range(len(content)):
        path.write_bytes(content[:end])
        unseen -= not damage(path, thoroughly=True)
    assert unseen == 0


def test_a_changed_byte_is_detected_by_the_checksum(tmp_path: Path) -> None:
    """When any byte of a file that MindSpore wrote with a checksum has changed, then that is
    detected."""
    path = tmp_path / "a-1_1.ckpt"
    mindspore.save_checkpoint(layer(1.0), str(path), crc_check=True)
    content = path.read_bytes()
    path.chmod(0o600)
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert damage(path, thoroughly=True)


def test_file_names_of_later_runs_are_those_of_mindspore(tmp_path: Path) -> None:
    """When runs follow each other in one directory, then tft's file names are those of MindSpore's
    own callback."""
    directory = tmp_path / "rank_3"
    for _ in range(3):
        series = open_series(tmp_path, 3, "mlp")
        config = train.CheckpointConfig(save_checkpoint_steps=2, integrated_save=False)
        kept = train.ModelCheckpoint(prefix="mlp_rank_3", directory=str(directory), config=config)
        net = layer(1.0)
        rows = [(numpy.ones((1, 4), numpy.float32), numpy.ones((1, 3), numpy.float32))] * 2
        data = mindspore.dataset.GeneratorDataset(rows, column_names=["x", "y"], shuffle=False)
        optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        model = train.Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer)
        before = set(directory.glob("*.ckpt"))
        model.train(1, data, callbacks=[kept], dataset_sink_mode=False)
        (new,) = set(directory.glob("*.ckpt")) - before
        assert new.name == str(series.name(1, 2))


def test_all_ranks_resume_from_a_last_checkpoint_of_mindspore(tmp_path: Path) -> None:
    """When rank 1 of 8 is lost and the savers write MindSpore's own checkpoints, then every rank
    finds a file that MindSpore loads, with the state of its group."""
    groups = Sizes(dp=8, shards=4).replicas()
    for rank in savers(groups, gone={1}):
        cell = layer(float(rank % 4))
        series = Series(root=tmp_path, rank=rank, prefix="llama2_13b")
        series.save(5, 1, partial(save, cell))
        series.note(5, 1)
    found = find(tmp_path, groups, high_availability=True)
    assert found.last
    for rank, path in found.files.items():
        loaded = mindspore.load_checkpoint(str(path))
        assert {name: set(each.asnumpy().flat) for name, each in loaded.items()} == {
            "weight": {rank % 4},
            "bias": {rank % 4},
        }
