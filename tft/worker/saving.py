"""
Writing and reading of shards as files, and the combination of the files of all ranks into one
checkpoint.

The adaptor writes and reads the shards, unless the script has its own functions for that.
"""

import inspect
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy
import structlog

from tft import checkpoint
from tft.checkpoint import CheckpointStore, Manifest
from tft.errors import CheckpointCorrupt, Interrupted, OrderRefused, UsageError
from tft.files import sync
from tft.logs import quiet_log
from tft.protocol.messages import SavedFile, ShardCopies

log = structlog.get_logger()

Write = Callable[[Path], Sequence[str]]
"""A function that writes a copy of a shard to files under a directory, and returns the names of
these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """
    The user's own functions for writing and reading shards. Each call handles one shard, in a
    directory of its own.
    """

    save: Callable[..., None]
    load: Callable[..., None]

    def told(self, function: Callable[..., None], shard: str) -> dict[str, str]:
        """
        Return the keyword arguments for a call of the user's `function` for this shard. The only
        argument is `shard`. It is left out if the function has no parameter of this name.
        """
        return {"shard": shard} if "shard" in inspect.signature(function).parameters else {}


def own_functions(parts: Mapping[str, Any]) -> Own | None:  # Any: objects of the user, of any class
    """
    Return the user's own `save` and `load` from `parts`, the arguments of `session.adopt`. Return
    None if `parts` has neither.

    Raises `UsageError` if only one is given, if one is not callable, or if `make` is given too.
    """
    given = {name: parts[name] for name in ("save", "load") if parts.get(name) is not None}
    if not given:
        return None
    if len(given) == 1:
        raise UsageError(
            f"session.adopt was given only {', '.join(given)}: give it both save and load, or "
            "neither"
        )
    for name, function in given.items():
        if not callable(function):
            raise UsageError(
                f"the argument {name} of session.adopt must be a function, not a "
                f"{type(function).__name__}"
            )
    if "make" in parts:
        raise UsageError(
            "session.adopt takes either make, or save and load: when the last checkpoint is "
            "written, the objects that make returned no longer exist, so save would have nothing "
            "to write"
        )
    return Own(**given)


class Saving:
    """
    Writes and reads the shards of one rank: with the user's functions if there are any, otherwise
    with the adaptor.
    """

    def __init__(self, hook: pluggy.HookRelay) -> None:
        self._hook = hook
        self._own: Own | None = None
        self.exports = False
        """True if the training loop can write a checkpoint of its framework."""

    def give(self, own: Own) -> None:
        """
        Set the user's own functions, which write and read shards from now on.
        """
        self._own = own

    @property
    def own(self) -> bool:
        """
        Return True if the user's own functions write and read shards.
        """
        return self._own is not None

    def check(self, shards: Sequence[ShardCopies], export: Path | None = None) -> None:
        """
        Check that the user's functions can tell the shards of this rank apart. `export` is the
        directory for a checkpoint of the framework, if the job is to write one.

        Raises `UsageError` if the rank holds several shards, and the user's `save` or `load` has no
        parameter `shard`. Raises `UsageError` if the training loop cannot write the checkpoint for
        `export`.
        """
        if export is not None and not self.exports:
            raise UsageError(
                "the training loop of this script has no checkpoints of a framework, so it cannot "
                "write one (--export): the checkpoints of tft can be loaded with torch alone"
            )
        own = self._own
        if own is None or len(shards) < 2:
            return
        for name, function in (("save", own.save), ("load", own.load)):
            if not own.told(function, ""):
                raise UsageError(
                    f"this rank holds the shards {', '.join(each.shard for each in shards)}, and "
                    f"tft calls the script's function {name} once for each shard: {name} must take "
                    "a parameter `shard`"
                )

    # ---------------------------------------------------------------- writing

    def save(
        self, directory: Path, shard: str, step: int, shards: Sequence[str] = (), attempt: int = 0
    ) -> Sequence[str]:
        """
        Write a shard as it is at the end of `step`, and return the names of its files.

        Called on the training thread. `shards` are all shards that this rank writes to the
        checkpoint. `attempt` is the number of the attempt to write the checkpoint.
        """
        if self._own is not None:
            return self._saved_by(self._own, directory, shard, step)
        names: Sequence[str] = self._hook.tft_save(
            directory=directory,
            shard=shard,
            step=step,
            shards=shards or (shard,),
            attempt=attempt,
        )
        return names

    def stage(self, directory: Path, shard: str, step: int) -> Write:
        """
        Copy a shard at the end of `step`, and return a function that writes the copy under
        `directory` while training continues.

        If the user has a save function, it writes the shard before this call returns, because it
        reads state that the next step changes.
        """
        if self._own is not None:
            names = self._saved_by(self._own, directory, shard, step)
            return lambda _: names
        write: Write = self._hook.tft_stage(shard=shard, step=step)
        return write

    def copy(self, directory: Path, shard: str, step: int, rank: int) -> Sequence[str]:
        """
        Write a second copy of a shard that another rank writes too. Return the names of the files.

        If the copy cannot be written, log this and return no names.
        """
        place = checkpoint.copy_of(directory, rank)
        return self.copied(place, shard, lambda place: self.save(place, shard, step))

    def copied(self, place: Path, shard: str, write: Write) -> Sequence[str]:
        """
        Write a second copy of a shard into the directory `place` with the function `write`. Return
        the names of the files.

        If the copy cannot be written, log this and return no files.
        """
        try:
            place.mkdir(parents=True, exist_ok=True)
            return [f"{place.name}/{name}" for name in write(place)]
        except Exception as error:
            log.warning("copy_not_written", shard=shard, why=str(error), exc_info=error)
            # remove the incomplete copy: the disk space is needed. Leave the copies of other shards
            with suppress(OSError):
                checkpoint.remove_shard(place, shard)
            return ()

    def _saved_by(self, own: Own, directory: Path, shard: str, step: int) -> list[str]:
        place, began = directory / shard, time.monotonic()
        # call the hook `tft_beside` before the user's `save`: the hook raises an exception if the
        # adaptor refuses to save, for a reason that the script cannot know
        kept = self._hook.tft_beside(shard=shard) if self._hook.tft_beside.get_hookimpls() else None
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _called(own.save, place, step, **own.told(own.save, shard))
        files = _synced(place)
        if kept is not None:
            beside = directory / _beside(shard)
            checkpoint.write_synced(beside, kept)
            files.append(beside)
        quiet_log.info("saved_by_script", step=step, shard=shard, seconds=time.monotonic() - began)
        return [str(file.relative_to(directory)) for file in files]

    def join(
        self, directory: Path, files: Sequence[SavedFile], *, step: int, world: int, adaptor: str
    ) -> Manifest:
        """
        Let the adaptor join the parts that the ranks have written to `directory`. Return the
        manifest of all files. The user's own files are not joined.
        """
        written = [file.name for file in files]
        join = self._hook.tft_join
        names = () if self.own else join(directory=directory, files=written, step=step) or ()
        joined = [checkpoint.digest_file(directory, name) for name in names]
        return checkpoint.manifest(
            step=step, world=world, adaptor=adaptor, files=(*files, *joined), own=self.own
        )

    def commit(self, partial: Path, final: Path, manifest: Manifest) -> None:
        """
        Commit the checkpoint in the directory `partial` under its final name `final` (see
        `checkpoint.commit`). Then let the adaptor record it as the newest checkpoint.
        """
        checkpoint.commit(partial, final, manifest)
        self._hook.tft_newest(directory=final.parent, newest=final, step=manifest.step)

    def give_up(self, store: CheckpointStore, step: int) -> None:
        """
        Set the checkpoints of steps later than `step` aside, because the job has given up these
        steps (see `checkpoint.give_up`). Then let the adaptor record which checkpoint is the newest
        now.
        """
        if not checkpoint.give_up(store, step) or not self._hook.tft_newest.get_hookimpls():
            return
        newest = next(iter(checkpoint.committed(store)), None)
        step = checkpoint.manifest_of(newest).step if newest is not None else 0
        self._hook.tft_newest(directory=store.directory, newest=newest, step=step)

    # ---------------------------------------------------------------- reading

    def load(self, directory: Path, shards: Sequence[str], rank: int, step: int) -> None:
        """
        Read shards from a checkpoint of `step`. Before that, verify all files that are to be read.

        Raises `CheckpointCorrupt` if a file is missing or damaged. Raises `OrderRefused` if the
        adaptor wrote the checkpoint but the user's functions would read it, or the other way round.
        """
        known, places = checkpoint.verify_shards(directory, shards, rank, step)
        if known.own and not self.own:
            raise OrderRefused(
                f"the checkpoint {directory} was written by a save function of the script: give "
                "session.adopt that function as save, and the function that reads its files as load"
            )
        if self.own and not known.own:
            raise OrderRefused(
                f"the checkpoint {directory} was written by the adaptor {known.adaptor!r}, not by "
                "the script's own functions: leave save and load out of session.adopt to go on "
                "from this checkpoint"
            )
        for shard, place in places.items():
            if place != directory:
                log.warning("another_copy_read", shard=shard, directory=str(place))
            if self._own is None:
                self._hook.tft_load(directory=place, shard=shard)
            else:
                self._loaded_by(self._own, place, shard)

    def _loaded_by(self, own: Own, directory: Path, shard: str) -> None:
        _called(own.load, directory / shard, **own.told(own.load, shard))
        if self._hook.tft_replaced.get_hookimpls():
            beside = directory / _beside(shard)
            try:
                kept = beside.read_bytes()
            except OSError as error:
                raise CheckpointCorrupt(
                    f"the file {beside} of a checkpoint cannot be read: {error.strerror}"
                ) from None
            self._hook.tft_replaced(shard=shard, beside=kept)


# Any: the arguments of the user's function, of any type
def _called(function: Callable[..., None], *args: Any, **told: str) -> None:
    """
    Call a function of the user.

    Every `Exception` is raised unchanged, and so is an exception that ends the process or the loop.
    Any other `BaseException`, such as the one that torch raises when the disk is full, is raised as
    a `RuntimeError`.
    """
    try:
        function(*args, **told)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, Interrupted):
        raise
    except BaseException as error:
        name = getattr(function, "__name__", "a function")
        line = str(error).partition("\n")[0]
        raise RuntimeError(f"{name} has raised {type(error).__name__}: {line}") from error


def _beside(shard: str) -> str:
    return f"{shard}{checkpoint.BESIDE}"


def _synced(place: Path) -> list[Path]:
    """
    Sync all files and directories under a directory to the disk, and return the files.

    Raises `UsageError` if there are no files, or if there is a symbolic link: its target may be
    gone when the checkpoint is read.
    """
    found = sorted(place.rglob("*"))
    for each in found:
        if each.is_symlink():
            raise UsageError(
                f"the script's function save has created the symbolic link {each}: a checkpoint "
                "must contain only regular files"
            )
    files = [each for each in found if each.is_file()]
    if not files:
        raise UsageError(f"the script's function save has written no file under {place}")
    for each in [*found, place]:
        sync(each)
    return files
