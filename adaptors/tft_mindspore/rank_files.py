"""
The names of the checkpoint files that each rank of a MindSpore job writes. This module also checks
whether a file is complete, and moves a written file to its final place. Examples of names for the
files of rank 4:

    rank_4/llama2_13b_rank_4-5_1.ckpt     step 1 of epoch 5, named by MindSpore Transformers
    rank_4/llama2_13b_rank_4_1-7_1.ckpt   step 1 of epoch 7; `_1-` because a second run wrote it
    rank_4/checkpoint-2_1875.ckpt         step 1875 of epoch 2, named by MindSpore itself
    ckpt_dir4/checkpoint-2_1875.ckpt      the same file in the directory of older guides
    rank_4/meta.json                      names the newest checkpoint file, and is written after it

This module imports no framework: the caller passes a function that writes the content of a file.
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tft.spi import sync

META = "meta.json"
DIRECTORIES = ("rank_{}", "ckpt_dir{}")
"""The possible names of the directory of a rank. MindSpore Transformers uses the first name, and
older guides of MindSpore use the second."""

# no leading zeros, because MindSpore writes no leading zeros into file names
_NUMBER = r"0|[1-9][0-9]*"
_NAME = re.compile(
    rf"(?P<prefix>.+?)(_rank_(?P<rank>{_NUMBER}))?(_(?P<again>[1-9][0-9]*))?"
    rf"-(?P<epoch>{_NUMBER})_(?P<step>{_NUMBER})\.(?P<kind>ckpt|safetensors)"
)
_BLOCK = 4 * 2**20
"""The number of bytes of a file to read at a time. This number is so large that few calls are
needed, and small compared with the training state in memory."""
_PARAMETER = 0x0A
"""The byte with which each parameter in a .ckpt file begins. In protobuf this byte announces the
field 1, and the length of the field follows."""
_CHECKSUM = b"crc_num"
_CHECKSUM_BYTES = len(_CHECKSUM) + 10
"""The size in bytes of the checksum that MindSpore appends to a .ckpt file on request. The checksum
consists of the word `crc_num` and a number of ten bytes."""
_HEADER_BYTES = 8
"""The size in bytes of the length field at the beginning of a .safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """
    The parts of a checkpoint file's name.
    """

    prefix: str
    rank: int | None = None
    """The rank to which the file belongs. None if the name of the file contains no rank. In this
    case only the name of the directory contains the rank."""
    again: int = 0
    """The number of earlier runs that have written files with the same prefix into the
    directory."""
    epoch: int
    step: int
    """The step within the epoch."""
    kind: str = "ckpt"

    def __str__(self) -> str:
        of_rank = "" if self.rank is None else f"_rank_{self.rank}"
        of_run = f"_{self.again}" if self.again else ""
        return f"{self.prefix}{of_rank}{of_run}-{self.epoch}_{self.step}.{self.kind}"

    @property
    def at(self) -> tuple[int, int]:
        """
        Return the epoch and the step. All ranks' files of the same checkpoint have the same epoch
        and step.
        """
        return self.epoch, self.step

    @property
    def age(self) -> tuple[int, int, int]:
        """
        Return a value by which the files of a rank can be sorted: a newer file has a higher value.
        The value is a tuple of the number of the run, the epoch and the step.
        """
        return self.again, self.epoch, self.step

    def of(self, rank: int) -> "Name":
        """
        Return the name of the corresponding file of another rank.
        """
        return self if self.rank is None else replace(self, rank=rank)


def read_name(text: str) -> Name | None:
    """
    Return the parts of the file name `text`. Return None if `text` is not the name of a checkpoint
    file.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    rank, again = match["rank"], match["again"]
    return Name(
        prefix=match["prefix"],
        rank=None if rank is None else int(rank),
        again=int(again or 0),
        epoch=int(match["epoch"]),
        step=int(match["step"]),
        kind=match["kind"],
    )


def names(directory: Path, rank: int) -> Iterator[Name]:
    """
    Yield the names of the checkpoint files in the directory of a rank, in any order. Leave out
    files whose name has another rank.
    """
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        name = read_name(path.name)
        if name is not None and name.rank in (None, rank) and path.is_file():
            yield name


def newest(directory: Path, rank: int) -> Name | None:
    """
    Return the name of the newest checkpoint file in the directory of a rank. Return None if the
    directory has no checkpoint files.

    If `meta.json` names a file that exists, return the name of this file. Otherwise return the name
    of the file with the highest epoch and step of the newest run.
    """
    there = list(names(directory, rank))
    noted = read_meta(directory)
    if noted in there:
        return noted
    return max(there, key=lambda name: (name.age, name.kind), default=None)


# ---------------------------------------------------------------- meta.json


def read_meta(directory: Path) -> Name | None:
    """
    Return the name of the newest checkpoint file of a rank, as recorded in the file `meta.json` of
    its directory. Return None if `meta.json` is missing, invalid or contradicts itself.
    """
    try:
        noted = json.loads((directory / META).read_bytes())
        name = read_name(noted["last_ckpt_file"])
        at = noted["last_epoch"], noted["last_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if name is not None and name.at == at else None


def write_meta(directory: Path, name: Name) -> None:
    """
    Record in the file `meta.json` of `directory` that `name` is the newest checkpoint file there.
    The checkpoint file must already exist.
    """
    noted = {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}
    put(directory / META, lambda draft: draft.write_text(json.dumps(noted)))


# ---------------------------------------------------------------- writing


def put(path: Path, write: Callable[[Path], object]) -> None:
    """
    Let the function `write` write a file into a temporary directory, sync the file, and move the
    file to `path`. The directory of `path` is created if necessary.

    The temporary path that `write` gets ends in the final file name. MindSpore would change another
    name, because it appends `.ckpt` to a name without this ending.
    """
    beside = path.with_name(f".{path.name}.partial")
    new = not path.parent.exists()
    shutil.rmtree(beside, ignore_errors=True)  # an interrupted attempt may have left the directory
    beside.mkdir(parents=True)
    try:
        draft = beside / path.name
        write(draft)
        sync(draft)
        draft.replace(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sync(path.parent)
    if new:
        sync(path.parent.parent)


# ---------------------------------------------------------------- checks that a file is whole


def damage(path: Path, *, thoroughly: bool = False) -> str:
    """
    Return, as a sentence, what is wrong with the checkpoint file at `path`. Return an empty string
    if the file looks complete.

    With `thoroughly=True`, also read a whole .ckpt file and verify its checksum, if the file has a
    checksum.
    """
    try:
        with path.open("rb") as file:
            why = _of_safetensors(file) if path.suffix == ".safetensors" else _of_ckpt(file)
            if not why and thoroughly and path.suffix != ".safetensors":
                why = _of_checksum(file)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    return f"{path} {why}" if why else ""


def _size(file: BinaryIO) -> int:
    return file.seek(0, 2)


def _of_ckpt(file: BinaryIO) -> str:
    """
    Check that a .ckpt file is complete. The file must be a sequence of parameters, each with its
    length, and the last parameter must end at the end of the file. Return what is wrong, as a text,
    or an empty string if the file is complete.
    """
    size = _size(file)
    if not size:
        return "is empty"
    end = size - _CHECKSUM_BYTES if _checksum(file) is not None else size
    at = 0
    while at < end:
        file.seek(at)
        # the first byte of the entry of a parameter, and a length of at most ten bytes
        head = file.read(11)
        length, width = _length(head[1:])
        if head[0] != _PARAMETER or width is None:
            return f"is not a checkpoint of MindSpore, or damaged, or encrypted: see byte {at}"
        if at + 1 + width + length > end:
            missing = at + 1 + width + length - end
            return f"ends in the middle of a parameter, {missing} bytes before its end"
        at += 1 + width + length
    return "" if at else "has no parameter"


def _length(encoded: bytes) -> tuple[int, int | None]:
    """
    Decode a number in protobuf's varint format, in which each byte has seven bits of the number.
    Return the number, and how many bytes its encoding takes. If `encoded` ends before the encoding
    ends, return 0 and None.
    """
    length = 0
    for width, byte in enumerate(encoded, 1):
        length |= (byte & 0x7F) << 7 * (width - 1)
        if byte < 0x80:
            return length, width
    return 0, None


def _checksum(file: BinaryIO) -> int | None:
    size = _size(file)
    if size < _CHECKSUM_BYTES:
        return None
    file.seek(size - _CHECKSUM_BYTES)
    tail = file.read()
    return int.from_bytes(tail[len(_CHECKSUM) :]) if tail.startswith(_CHECKSUM) else None


def _of_checksum(file: BinaryIO) -> str:
    expected = _checksum(file)
    if expected is None:
        return ""
    left = _size(file) - _CHECKSUM_BYTES
    found = 0
    file.seek(0)
    while left and (block := file.read(min(left, _BLOCK))):
        found = zlib.crc32(block, found)
        left -= len(block)
    return "" if found == expected else "differs from what was written: its checksum is another"


def _of_safetensors(file: BinaryIO) -> str:
    """
    Check that a .safetensors file is complete: its header says at which byte each tensor ends, and
    the last tensor must end at the end of the file. Return what is wrong, as a text, or an empty
    string if the file is complete.
    """
    size = _size(file)
    if not size:
        return "is empty"
    file.seek(0)
    header = int.from_bytes(file.read(_HEADER_BYTES), "little")
    if size < _HEADER_BYTES or header > size - _HEADER_BYTES:
        return "ends in the middle of its header"
    try:
        described = json.loads(file.read(header))
        described.pop("__metadata__", None)
        ends = [each["data_offsets"][1] for each in described.values()]
        needed = _HEADER_BYTES + header + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "has a header that cannot be read"
    return "" if needed == size else f"has {size} bytes, where its header says {needed}"
