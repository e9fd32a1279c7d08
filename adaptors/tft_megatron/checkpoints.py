"""
Writes checkpoints in megatron-core's own distributed form, `torch_dist`.

Each rank writes its shard alone. In a shard, tensors have the keys that megatron-core gives them,
and each piece of a tensor is stored with its place in the whole tensor. A shard also has a
description, with which this adaptor restores the shard exactly. The rank that commits the
checkpoint joins the metadata of all shards into one `.metadata` file. The function
`megatron.core.dist_checkpointing.load` can then read the whole checkpoint, without tft.

    latest_checkpointed_iteration.txt
    iter_0000042/   .metadata, metadata.json, common.pt      for all shards, written last
                    SHARD/.metadata, SHARD/__0_0.distcp, …   written by one rank

The joined `.metadata` refers to the files of the shards. So no tensor is read or copied when the
shards are joined.
"""

import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from tft_pytorch.checkpoints import (
    META,
    METADATA,
    adds,
    placed,
    read_meta,
    reading,
    shards_among,
    write,
    writing,
)
from tft_pytorch.trees import copied, expect
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult

from tft.errors import CheckpointCorrupt
from tft.spi import pack, sync, unpack, write_whole
from tft_megatron.generators import ModelPart, consumed, generators
from tft_megatron.layout import Content, Placed

_FORM = 1
"""The version of a shard's description. A description of another version is refused."""

_OWN = "tft.own."
"""The prefix of the names of tensors that only this adaptor reads, not megatron-core."""

_COMMON = "tft.common"
"""The name of the entry of a shard that has the content for the file `common.pt`. Only one shard
of a checkpoint needs this entry."""

_GENERATORS = "rng_state"
"""The name under which a checkpoint has the states of the random generators of all ranks."""

_LOCAL_STATE = re.compile(r"local-state-rank(\d+)\.bin")
"""The name of the file, in a checkpoint, with the rank-local state of one rank."""

_BACKEND = CheckpointingConfig("torch_dist", 1)
"""The checkpoint format, as megatron-core 0.16 describes it in `metadata.json`."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that tells Megatron's training program which checkpoint is the newest."""


View = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Says where a part of a tensor is stored, if the tensor has no entry of its own in the shard. A
tensor needs no entry of its own if other entries have all its elements. The fields are the name of
the entry that has the part, the shape and the strides of the part, and the offset of its first
element in the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """
    The content that is written for one shard.
    """

    described: bytes
    """The description of the shard: its values that are no tensors, and the types and shapes of its
    tensors. The adaptor needs it to load the shard."""
    own: Mapping[str, Tensor]
    """The tensors that the adaptor needs to load the shard, by name. A tensor that is also in
    `content` is written only once."""
    content: Content
    """The tensors and objects that megatron-core reads from the checkpoint."""
    part: ModelPart
    """The part of the model (such as a pipeline stage) to which the shard belongs."""

    def parts(self) -> tuple[bytes, dict[str, Any]]:
        """
        Return the description of the shard as bytes, and the entries to be written, by name.
        """
        kept = self.content.tensors
        views = views_of(self.own, [piece for piece in kept if not piece.derived])
        entries: dict[str, Any] = {piece.name: piece.tensor for piece in kept}
        entries |= self.content.objects
        entries |= {f"{_OWN}{name}": t for name, t in self.own.items() if name not in views}
        if self.content.common:
            entries[_COMMON] = _saved(self.content.common)
        meta = {
            "form": _FORM,
            "described": self.described,
            "pieces": {
                piece.name: [piece.key, list(piece.whole), list(piece.at), piece.first]
                for piece in kept
            },
            "views": {name: [list(view) for view in found] for name, found in views.items()},
            "part": asdict(self.part),
        }
        return pack(meta), entries


def views_of(own: Mapping[str, Tensor], pieces: Sequence[Placed]) -> dict[str, list[View]]:
    """
    Find the tensors of `own` that need not be written, because `pieces` contain all their elements.
    Return, for each such tensor, its views in the pieces.

    A piece contains an element of a tensor if the element has the same address in memory in both.
    """
    lying: dict[tuple[int, torch.dtype], list[tuple[int, int, str]]] = {}
    for name, tensor in own.items():
        if tensor.is_contiguous() and tensor.numel():
            begin = int(tensor.storage_offset())
            lying.setdefault(_memory(tensor), []).append((begin, begin + tensor.numel(), name))
    for stretches in lying.values():
        stretches.sort()
    found: dict[str, list[View]] = {}
    for piece in pieces:
        tensor, stretches = piece.tensor, lying.get(_memory(piece.tensor), [])
        begin = int(tensor.storage_offset())
        last = begin + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        near = bisect_right(stretches, begin, key=lambda stretch: stretch[0]) - 1
        if near >= 0 and tensor.numel() and last < stretches[near][1]:
            start, _, name = stretches[near]
            view = (piece.name, tuple(tensor.shape), tuple(tensor.stride()), begin - start)
            found.setdefault(name, []).append(view)
    return {
        name: views
        for name, views in found.items()
        if sum(prod(shape) for _, shape, _, _ in views) == own[name].numel()
    }


def _memory(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _saved(common: Mapping[str, Any]) -> Tensor:  # Any: the values may have any type
    content = io.BytesIO()
    torch.save(dict(common), content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


# ---------------------------------------------------------------- one shard


def save(directory: Path, shard: str, written: Written) -> list[str]:
    """
    Write the shard under `directory`/`shard`, and sync the files. Return the names of the files,
    relative to `directory`.

    Files of an earlier attempt under `directory`/`shard` are removed first.
    """
    return _write(directory, shard, *written.parts())


def stage(shard: str, written: Written) -> Callable[[Path], list[str]]:
    """
    Copy the shard into host memory. Return a function that writes the copy into a directory, as
    `save` does. The returned function can be called once.
    """
    meta, entries = written.parts()
    copy = copied(entries)
    return lambda directory: _write(directory, shard, meta, copy)


def _write(directory: Path, shard: str, meta: bytes, entries: Mapping[str, Any]) -> list[str]:
    # The planner of torch must not flatten values, because torch would look for tensors in
    # megatron-core's objects.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return write(directory, shard, meta, entries, planner)


def load(
    directory: Path, shard: str, room: Callable[[bytes], dict[str, Tensor]]
) -> tuple[bytes, dict[str, Tensor]]:
    """
    Read a shard that `save` wrote. Return the description, and the tensors by name.

    `room` is a function that takes the description and returns the tensors into which the shard is
    read, by name. Raises `CheckpointCorrupt` if the shard cannot be read.
    """
    place = directory / shard
    with reading(place):
        told = _told(place)
        meta = expect(told.get("described"), bytes, "the description of a shard")
        own = room(meta)
        asked: dict[str, Tensor] = {}
        for name, tensor in own.items():
            if name not in told["views"]:
                asked[f"{_OWN}{name}"] = tensor.detach()
            for view, shape, stride, begin in told["views"].get(name, ()):
                at = tensor.storage_offset() + begin
                asked[view] = tensor.detach().as_strided(shape, stride, at)
        dcp_load(dict(asked), storage_reader=FileSystemReader(place), no_dist=True)
    return meta, own


def _told(place: Path) -> dict[str, Any]:
    told = expect(unpack(read_meta(place)), dict, "the description of a shard")
    if told.get("form") != _FORM:
        raise CheckpointCorrupt(
            f"the description in the checkpoint {place} has the format number {told.get('form')}, "
            f"but this version of tft reads format {_FORM}: continue with the version of tft that "
            "wrote the checkpoint"
        )
    return told


# ---------------------------------------------------------------- joining the parts


def join(directory: Path, files: Iterable[str]) -> list[str]:
    """
    Join the shards among `files`, and write under `directory` the files that megatron-core needs to
    load the whole checkpoint. Return the names of the written files, relative to `directory`.

    This function reads only small files, and only files that `files` names. Raises
    `CheckpointCorrupt` if a file cannot be read, or if no shard has the state that megatron-core
    stores once for all ranks.
    """
    whole = _Whole(directory)
    names = list(files)
    for shard in shards_among(names):
        whole.add(shard)
    if whole.common is None:
        raise CheckpointCorrupt(
            f"no shard under {directory} contains the state that all ranks have in common"
        )
    captured = _captured(directory, names)
    drawn = generators(whole.parts, captured)
    written = _write(directory, _GENERATORS, pack({"form": _FORM, "pieces": {}}), drawn)
    whole.add(_GENERATORS)
    with writing(METADATA):
        FileSystemWriter(directory, sync_files=True).finish(whole.known, [whole.stored()])
    _put(directory / COMMON_STATE_FNAME, _counted(whole.common, consumed(captured)))
    _put(directory / CONFIG_FNAME, json.dumps(asdict(_BACKEND)).encode())
    sync(directory)
    return [METADATA, COMMON_STATE_FNAME, CONFIG_FNAME, *written]


class _Whole:
    """
    The metadata of all shards, joined as one checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.known = Metadata(state_dict_metadata={}, planner_data=None)
        self._stored: dict[MetadataIndex, WriteResult] = {}
        self.common: bytes | None = None
        self._parts: dict[ModelPart, None] = {}

    @property
    def parts(self) -> list[ModelPart]:
        """
        Return the parts of the model to which the added shards belong. Each part is listed once.
        """
        return list(self._parts)

    def stored(self) -> list[WriteResult]:
        """
        Return, for each piece of a tensor, the record of the file and the offset where the piece is
        stored.
        """
        return list(self._stored.values())

    def add(self, shard: str) -> None:
        """
        Add the metadata of a shard, read from its directory.
        """
        place = self._directory / shard
        with reading(place):
            found = FileSystemReader(place).read_metadata()
            told = _told(place)
            if self.common is None and _COMMON in found.state_dict_metadata:
                self.common = _read_common(place, found)
        if "part" in told:
            self._parts[_part(told["part"])] = None
        for index, info in found.storage_data.items():
            name, known, at = index.fqn, found.state_dict_metadata[index.fqn], index
            if name in (META, _COMMON) or name.startswith(_OWN):
                continue
            if name in told["pieces"]:
                name, size, begin, first = told["pieces"][name]
                if not first:
                    continue
                assert isinstance(known, TensorStorageMetadata)
                known, at = placed(known, MetadataIndex(name), size, begin)
            if adds(self.known, name, known):
                path = f"{shard}/{info.relative_path}"
                self._stored[at] = WriteResult(at, info.length, replace(info, relative_path=path))


def _counted(common: bytes, samples: int | None) -> bytes:
    """
    Return `common`, the content of `common.pt`, with `samples` as the number of consumed samples.
    If `samples` is None, return `common` unchanged.
    """
    if samples is None:
        return common
    content = torch.load(io.BytesIO(common), weights_only=True)
    return _saved({**content, "consumed_train_samples": samples}).numpy().tobytes()


def _part(told: Mapping[str, Any]) -> ModelPart:
    return ModelPart(
        pipeline=tuple(told["pipeline"]),
        tensor=tuple(told["tensor"]),
        experts=told["experts"],
        ranks=tuple(told["ranks"]),
    )


def _captured(directory: Path, files: Iterable[str]) -> dict[int, bytes]:
    """
    Read the rank-local state of each rank whose file is among `files`. Return the states by rank.
    """
    found = {int(match[1]): match[0] for file in files if (match := _LOCAL_STATE.fullmatch(file))}
    # the rank-local state begins after the first line of the file, which names the rank
    return {r: (directory / name).read_bytes().partition(b"\n")[2] for r, name in found.items()}


def _read_common(place: Path, found: Metadata) -> bytes:
    known = found.state_dict_metadata[_COMMON]
    assert isinstance(known, TensorStorageMetadata)
    content: dict[str, Tensor] = {_COMMON: torch.empty(known.size, dtype=torch.uint8)}
    dcp_load(dict(content), storage_reader=FileSystemReader(place), no_dist=True)
    return content[_COMMON].numpy().tobytes()


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def point(directory: Path, newest: Path | None, step: int) -> None:
    """
    Tell Megatron's training program that `newest` is the newest checkpoint in `directory`: write
    the number `step` to the file `latest_checkpointed_iteration.txt`.

    Remove this file instead if `newest` is None, or does not have the name that Megatron expects
    for `step`.
    """
    tracker = directory / TRACKER
    if newest is not None and newest.name == f"iter_{step:07d}":
        write_whole(tracker, str(step))
    else:
        tracker.unlink(missing_ok=True)
