"""
The shard as a torch.distributed.checkpoint, which plain torch loads without tft: `model`, `optim`
and `scheduler` as `get_state_dict` and `state_dict` have them, and under `tft.meta` the
description by which this adaptor takes the shard back exactly.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tft.errors import CheckpointCorrupt
from tft_pytorch.state import Dense

_META = "tft.meta"


def save(
    directory: Path,
    shard: str,
    model: nn.Module,
    dense: Dense,
    scheduler: Any,  # Any: torch's schedulers have no common type
) -> list[str]:
    """
    Write the shard under `directory`/`shard`, synced; the names of its files from `directory` on.
    What an earlier attempt left there is removed.
    """
    place = directory / shard
    shutil.rmtree(place, ignore_errors=True)
    found = dense.inventory()
    meta = torch.frombuffer(bytearray(dense.describe(found)), dtype=torch.uint8)
    content: dict[str, Any] = {
        # plain torch asks for a tied parameter under each of its names, and not for buffers that
        # are not persistent; the adaptor for those, and for a tied parameter under one name
        "model": {name.removeprefix("model."): t for name, t in found.model.items()}
        | model.state_dict(),
        "optim": dense.optimizer_state(),
        "tft": {"meta": meta},
    }
    if scheduler is not None:
        content["scheduler"] = scheduler.state_dict()
    with _alone():
        dcp_save(content, storage_writer=FileSystemWriter(place, sync_files=True), no_dist=True)
    _sync_directory(place)
    _sync_directory(directory)
    return [f"{shard}/{file.name}" for file in sorted(place.iterdir())]


def load(directory: Path, shard: str, dense: Dense) -> None:
    """
    Take back what `save` wrote. Raises `CheckpointCorrupt` where it cannot be read.
    """
    place = directory / shard
    try:
        meta = _read_meta(place)
        room = dense.room(meta)
        with _alone():
            dcp_load(dict(room), storage_reader=FileSystemReader(place), no_dist=True)
    except (OSError, CheckpointException) as error:
        raise CheckpointCorrupt(f"{place} cannot be read as a checkpoint: {error}") from error
    dense.settle(meta, room)


def _read_meta(place: Path) -> bytes:
    known = FileSystemReader(place).read_metadata().state_dict_metadata.get(_META)
    if not isinstance(known, TensorStorageMetadata):
        raise CheckpointCorrupt(f"{place} has no entry {_META}: tft did not write it")
    meta: dict[str, Tensor] = {_META: torch.empty(known.size, dtype=torch.uint8)}
    with _alone():
        dcp_load(dict(meta), storage_reader=FileSystemReader(place), no_dist=True)
    return meta[_META].numpy().tobytes()


@contextmanager
def _alone() -> Iterator[None]:
    """
    Without torch's warning that one process saves on its own: that is what is wanted.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
