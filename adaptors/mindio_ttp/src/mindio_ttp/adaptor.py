"""
The hooks of the adaptor `mindio`, for training programs that are written for the library MindIO.
The hooks call the functions that the training program has registered.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mindio_ttp.exchange import serve
from mindio_ttp.program import Program
from tft.errors import UsageError
from tft.spi import Buffer, FaultKind, ShardCopies, ShardPayload, hookimpl

_programs: list[Program] = []
"""A list with the `Program` object of this process, which calls the functions that the training
program has registered. The list is empty until `announce` is called."""


def announce(program: Program) -> None:
    """
    Set the `Program` object of this process. The hooks of the adaptor call its methods.
    """
    _programs[:] = [program]


def _program() -> Program:
    if not _programs:
        raise UsageError(
            "the adaptor `mindio` is for training scripts that use the package mindio_ttp, but "
            "this script has not joined the job: call tft_init_processor and tft_start_processor "
            "first"
        )
    return _programs[0]


@hookimpl
def tft_strategies() -> Sequence[str]:
    return _program().strategies


@hookimpl
def tft_column() -> Sequence[int]:
    return _program().column()


@hookimpl
def tft_preload() -> None:
    return None


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    serve(host, port, opened)


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    _program().contributing = contributing


@hookimpl
def tft_adopt(parts: Mapping[str, Any]) -> None:  # Any: `parts` has objects of any class
    if parts.get("program") is not _program():
        raise UsageError(
            "session.adopt was called, but the adaptor `mindio` takes no objects: save and restore "
            "the state in functions that the script registers with mindio_ttp, such as "
            "tft_register_save_ckpt_handler"
        )


@hookimpl
def tft_shards() -> Sequence[ShardCopies]:
    return _program().shards()


@hookimpl
def tft_capture() -> bytes:
    return _program().local_state()


@hookimpl
def tft_rollback(local_state: bytes) -> None:
    _program().rollback(local_state)


@hookimpl
def tft_derive() -> bytes:
    return _program().derive()


@hookimpl
def tft_give(shard: str, step: int) -> ShardPayload:
    return ShardPayload(meta=_program().offer(shard, step), buffers=())


@hookimpl
def tft_take() -> Sequence[Buffer]:
    return ()


@hookimpl
def tft_taken(shard: str, meta: bytes) -> bool:
    return _program().need(shard, meta)


@hookimpl
def tft_compare() -> Mapping[str, str]:
    # an empty dict, because tft cannot read the training state: only the training program can
    return {}


@hookimpl
def tft_digests() -> Mapping[str, str]:
    return {}


@hookimpl
def tft_quiesce() -> None:
    _program().interrupt()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    # assume a wait, because tft does not know where the code of the training program waits
    return True


@hookimpl
def tft_clear() -> None:
    _program().left()


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    _program().regroup(name, host, port, rank, world)


@hookimpl
def tft_rebuild() -> Any:  # Any: tft lets this hook return any object
    _program().rebuild()
    return _program()


@hookimpl
def tft_save(directory: Path, step: int, shards: Sequence[str], attempt: int) -> Sequence[str]:
    return _program().save(directory, shards, step, attempt)


@hookimpl
def tft_join(directory: Path, step: int) -> Sequence[str]:
    _program().rename(directory, step)
    return ()


@hookimpl
def tft_load() -> None:
    _program().load()


@hookimpl
def tft_reload() -> Callable[[int | None], int] | None:
    return _program().reload if _program().reloads else None


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    return None  # the training program reports the kind of each error with `tft_report_error`
