"""
Writes and reads one shard as a checkpoint of torch.distributed.checkpoint.

Model, optimizer, scheduler and the user's other objects are stored in the form that torch's
`get_state_dict` and `state_dict` return. The entry `tft.meta` has the description from which this
adaptor restores the shard exactly. The process that commits the checkpoint (declares it complete)
joins the metadata of all shards. Plain torch can then load the whole checkpoint without tft.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from tft.errors import CheckpointCorrupt, chain_of
from tft.spi import sync
from tft_pytorch.shard_content import spans_of
from tft_pytorch.trees import copied

# torch warns when one process writes a checkpoint alone. tft always writes checkpoints in this way.
# The filter stays for the whole life of the process, because any thread may write a checkpoint at
# any time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

META = "tft.meta"
"""The name of the entry, in the checkpoint of a shard, that holds the description of the shard."""
METADATA = ".metadata"
"""torch's own name for the file with the metadata of a checkpoint."""


def stage(
    shard: str,
    meta: bytes,
    content: Mapping[str, Any],  # Any: a checkpoint may hold values of any type
) -> Callable[[Path], list[str]]:
    """
    Copy the content of a shard into host memory. Return a function that writes the copy into a
    directory later, as `write` does.
    """
    copy = copied(content)
    return lambda directory: write(directory, shard, meta, copy)


def with_all(
    tensors: Mapping[str, Tensor],
    content: Mapping[str, Any],  # Any: a checkpoint may hold values of any type
) -> dict[str, Any]:
    """
    Return `content` with an additional entry for each of `tensors` that would otherwise have no
    entry of its own in the checkpoint. torch stores a tuple as one entry, even if there are tensors
    in it.
    """
    stored: set[str] = set()
    traverse_state_dict(dict(content), lambda path, _: stored.add(".".join(map(str, path))))
    return {**content, **{name: t for name, t in tensors.items() if name not in stored}}


def write(
    directory: Path,
    shard: str,
    meta: bytes,
    content: Mapping[str, Any],  # Any: a checkpoint may hold values of any type
    planner: DefaultSavePlanner | None = None,
) -> list[str]:
    """
    Write `content` and the packed description `meta` of the shard under `directory`/`shard`, and
    sync the files. Return the names of the files, relative to `directory`.

    If a tensor is sharded, only this rank's part of the tensor is written. The position of the part
    in the whole tensor is stored in the description, and in the metadata that `join` writes. Files
    of an earlier attempt under `directory`/`shard` are removed first.
    """
    place = directory / shard
    shutil.rmtree(place, ignore_errors=True)
    described = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
    whole = {**content, META: described}
    with writing(shard):
        writer = FileSystemWriter(place, sync_files=True)
        dcp_save(whole, storage_writer=writer, planner=planner, no_dist=True)
    sync(place)
    sync(directory)
    return [f"{shard}/{file.name}" for file in sorted(place.iterdir())]


def load(
    directory: Path, shard: str, room: Callable[[bytes], Mapping[str, Tensor]]
) -> tuple[bytes, dict[str, Tensor]]:
    """
    Load a shard that `write` wrote. Return the packed description of the shard, and the shard's
    tensors by name.

    `room` is a function that takes the description and returns the tensors into which the content
    is loaded. Raises `CheckpointCorrupt` if the files cannot be read.
    """
    place = directory / shard
    with reading(place):
        meta = read_meta(place)
        tensors = dict(room(meta))
        dcp_load(dict(tensors), storage_reader=FileSystemReader(place), no_dist=True)
    return meta, tensors


def join(directory: Path, files: Iterable[str]) -> list[str]:
    """
    Join the metadata of the shards among `files` into the metadata of one checkpoint, and write the
    joined metadata into `directory`. Return the names of the written files, relative to
    `directory`.

    Only small files are read, and only files that `files` names. Raises `CheckpointCorrupt` if the
    metadata or the description of a shard cannot be read.
    """
    whole = Metadata(state_dict_metadata={}, planner_data={})
    stored: dict[MetadataIndex, WriteResult] = {}
    for place in [directory / shard for shard in shards_among(files)]:
        with reading(place):
            found = FileSystemReader(place).read_metadata()
            spans = spans_of(read_meta(place))
        for index, info in found.storage_data.items():
            known = found.state_dict_metadata[index.fqn]
            if index.fqn == META:
                continue
            at = index
            if index.fqn in spans and isinstance(known, TensorStorageMetadata):
                known, at = placed(known, index, *spans[index.fqn])
            # Several shards may have an entry of the same name. The shards come in the order of
            # their names, and the entry of the first shard is used.
            if adds(whole, index.fqn, known):
                whole.planner_data[index.fqn] = found.planner_data[index.fqn]
                path = f"{place.name}/{info.relative_path}"
                stored[at] = WriteResult(at, info.length, replace(info, relative_path=path))
    with writing(METADATA):
        FileSystemWriter(directory, sync_files=True).finish(whole, [list(stored.values())])
    return [METADATA]


def shards_among(files: Iterable[str]) -> list[str]:
    """
    Return the names of the shards whose files are in `files`.

    Only the first copy of each shard counts. The files of further copies are in deeper directories.
    """
    paths = [Path(file) for file in files]
    return sorted(
        str(path.parent) for path in paths if path.name == METADATA and len(path.parts) == 2
    )


def placed(
    known: TensorStorageMetadata, index: MetadataIndex, whole: list[int], at: list[int]
) -> tuple[TensorStorageMetadata, MetadataIndex]:
    """
    Return the metadata and the index of a part of a tensor, in the form that torch uses for a chunk
    of the whole tensor. `known` and `index` are the metadata and the index with which the part was
    stored, as if the part were a whole tensor.

    `whole` is the shape of the whole tensor, `at` the offset of the part in the whole tensor.
    """
    chunk = ChunkStorageMetadata(offsets=torch.Size(at), sizes=known.size)
    placed = TensorStorageMetadata(
        properties=known.properties, size=torch.Size(whole), chunks=[chunk]
    )
    return placed, MetadataIndex(index.fqn, chunk.offsets)


def adds(whole: Metadata, name: str, found: Any) -> bool:  # Any: one of several classes of torch
    """
    Add `found`, the metadata of the entry `name`, to the metadata `whole` of the checkpoint. Return
    False if `whole` already has all chunks of that entry.
    """
    known = whole.state_dict_metadata.setdefault(name, found)
    if known is found:
        return True
    if not isinstance(known, TensorStorageMetadata) or not isinstance(found, TensorStorageMetadata):
        return False
    places = {chunk.offsets for chunk in known.chunks}
    new = [chunk for chunk in found.chunks if chunk.offsets not in places]
    known.chunks.extend(new)
    return bool(new)


def read_meta(place: Path) -> bytes:
    """
    Return the packed description of the shard that `write` wrote into the directory `place`. Raises
    `CheckpointCorrupt` if the directory has no description.
    """
    known = FileSystemReader(place).read_metadata().state_dict_metadata.get(META)
    if not isinstance(known, TensorStorageMetadata):
        raise CheckpointCorrupt(
            f"the checkpoint {place} has no entry {META}, so the checkpoint was not written by tft"
        )
    meta: dict[str, Tensor] = {META: torch.empty(known.size, dtype=torch.uint8)}
    dcp_load(dict(meta), storage_reader=FileSystemReader(place), no_dist=True)
    return meta[META].numpy().tobytes()


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """
    Turn torch's exceptions about a checkpoint that cannot be read into `CheckpointCorrupt`.
    """
    try:
        yield
    except CheckpointException as error:
        why = _words(_underlying(error))
        raise CheckpointCorrupt(f"{place} cannot be read as a checkpoint: {why}") from error
    except (OSError, EOFError) as error:
        raise CheckpointCorrupt(f"{place} cannot be read as a checkpoint: {error}") from error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """
    Turn torch's exception about a failed write into an ordinary exception.

    torch's `CheckpointException` is not a subclass of `Exception`. So `except Exception` does not
    catch it, and the thread that raises it would end. The message of the ordinary exception has
    neither the traceback nor the position in the file, so that equal failures have equal messages.
    The log has the traceback and the position.

    Raises `OSError` if the system reported an error, else `RuntimeError`.
    """
    try:
        yield
    except CheckpointException as error:
        found = _underlying(error)
        disk = _disk(found)
        if disk is not None:
            raise OSError(disk.errno, disk.strerror) from error
        raise RuntimeError(f"torch cannot write {what}: {_words(found)}") from error


def _underlying(error: CheckpointException) -> Exception:
    """
    Return the first exception in the `CheckpointException`. If the first exception is not a
    subclass of `Exception`, raise that exception.
    """
    for _, (found, _) in sorted(error.failures.items()):
        if isinstance(found, Exception):
            return found
        raise found
    return RuntimeError("torch gives no reason")


def _disk(error: BaseException) -> OSError | None:
    """
    Return the `OSError` that caused `error`. Return None if no `OSError` caused it.

    When a write fails with an `OSError`, torch's writer raises another exception, which mentions
    only a position in a file.
    """
    found = (
        each for each in chain_of(error, hidden=True) if isinstance(each, OSError) and each.strerror
    )
    return next(found, None)


def _words(error: Exception) -> str:
    kind, line = type(error).__name__, str(error).partition("\n")[0]
    # leave out the message of a torch assertion, because its first line names only a line of
    # torch's source
    return kind if not line or line.startswith("[enforce fail") else f"{kind}: {line}"
