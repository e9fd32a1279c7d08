"""
Stores a shard as a checkpoint in MindSpore's own format. `mindspore.load_checkpoint` can read the
file `SHARD.ckpt`. The file `SHARD.plain` next to it has the values of the shard that are not
parameters.

Here SHARD is the name of the shard. The files of MindSpore Transformers, one for each rank, have
other names: see `layout.py`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from tft.errors import CheckpointCorrupt, TftError
from tft.spi import pack, sync, unpack
from tft_mindspore.memory import Array, content
from tft_mindspore.state import Shard


def save(directory: Path, shard: Shard, step: int) -> list[str]:
    """
    Write the shard under `directory`, and sync the files. Return the names of the files.

    Files that an earlier, interrupted attempt has written are replaced.
    """
    return _write(directory, shard.name, _contents(shard), shard.plain(), step)


def stage(shard: Shard, step: int) -> Callable[[Path], list[str]]:
    """
    Copy the shard. Return a function that writes the copy into a directory, as `save` does. The
    returned function can be called once, on another thread.
    """
    copies = {name: array.copy() for name, array in _contents(shard).items()}
    # pack the plain values now, because the values may change before the checkpoint is written
    plain = pack(shard.plain())
    return lambda directory: _write(directory, shard.name, copies, unpack(plain), step)


def load(directory: Path, shard: Shard) -> None:
    """
    Load a shard that `save` wrote. Raises `CheckpointCorrupt` if the shard cannot be read, or
    belongs to another model or optimizer.
    """
    from mindspore import load_checkpoint

    path = directory / f"{shard.name}.ckpt"
    try:
        # the file .ckpt exists only if some parameter of the shard has elements
        found = load_checkpoint(str(path)) if _solid(_contents(shard)) else {}
        plain = unpack((directory / f"{shard.name}.plain").read_bytes())
    except (OSError, ValueError, TypeError, RuntimeError, TftError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointCorrupt(f"{path} cannot be read as a checkpoint: {why}") from error
    if not isinstance(plain, dict):
        raise CheckpointCorrupt(
            f"the file {path.with_suffix('.plain')}, which belongs to a checkpoint, does not "
            "contain a dict: the file is damaged, or was not written by tft"
        )
    contents: dict[str, Array] = {}
    for name, parameter in shard.parameters.items():
        here = content(parameter)
        if not here.size:
            continue
        there = found.get(name)
        if there is None or there.asnumpy().shape != here.shape or there.dtype != parameter.dtype:
            raise CheckpointCorrupt(
                f"the checkpoint {path} has no parameter {name} of type {parameter.dtype} and "
                f"shape {list(here.shape)}, as this script has: the checkpoint belongs to another "
                "model or optimizer"
            )
        contents[name] = there.asnumpy()
    shard.settle(contents, plain)


def _contents(shard: Shard) -> dict[str, Array]:
    return {name: content(parameter) for name, parameter in shard.parameters.items()}


def _solid(contents: Mapping[str, Array]) -> dict[str, Array]:
    """
    Return the arrays that have at least one element. MindSpore silently leaves empty arrays out of
    its checkpoints.
    """
    return {name: array for name, array in contents.items() if array.size}


def _write(
    directory: Path,
    shard: str,
    contents: Mapping[str, Array],
    plain: Mapping[str, Any],  # Any: the values have various plain types
    step: int,
) -> list[str]:
    from mindspore import Tensor, save_checkpoint

    path, beside = directory / f"{shard}.ckpt", directory / f"{shard}.plain"
    solid = _solid(contents)
    for left in (path, beside):
        # remove the files of an earlier attempt, because MindSpore makes its checkpoint files
        # read-only
        left.unlink(missing_ok=True)
    written = [beside]
    if solid:
        told = [{"name": name, "data": Tensor(numpy.asarray(a))} for name, a in solid.items()]
        # Add the entry `step_num` to the file, as MindSpore does in its own checkpoints.
        save_checkpoint(told, str(path), append_dict={"step_num": step})
        written = [path, beside]
    beside.write_bytes(pack(dict(plain)))
    for each in written:
        sync(each)
    sync(directory)
    return [each.name for each in written]
