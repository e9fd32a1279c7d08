"""
Trainings whose adaptor is wrong in one way each. The processes of the contract suite import them.
"""

import array
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pluggy

from tests.contract.trainings import FakeTraining
from tft.protocol.messages import ShardCopies
from tft.spi.adaptor import AdaptorSpecs
from tft.spi.markers import hookimpl
from tft.spi.types import Buffer, ShardPayload
from tft.testing import adaptor as fake

_quiesced: list[bool] = []


class Broken(FakeTraining):
    """
    A training with the fake adaptor, some of whose hooks are replaced. None: the hook is missing.
    """

    instead: ClassVar[Mapping[str, Callable[..., Any] | None]] = {}

    @classmethod
    def hooks(cls) -> pluggy.HookRelay:
        """
        Return the hooks of the broken adaptor.
        """
        names = {name: each for name, each in vars(fake).items() if name.startswith("tft_")}
        for name, function in cls.instead.items():
            names.pop(name)
            if function is not None:
                names[name] = hookimpl(function)
        manager = pluggy.PluginManager("tft")
        manager.add_hookspecs(AdaptorSpecs)
        manager.register(types.SimpleNamespace(**names), "broken")
        return manager.hook


class WithoutClassify(Broken):
    """
    The required hook `tft_classify` is missing.
    """

    instead: ClassVar = {"tft_classify": None}


class WithoutBackups(Broken):
    """
    The adaptor keeps copies but lacks the hook that returns their steps.
    """

    instead: ClassVar = {"tft_backups": None}


def _takes_anything(parts: Mapping[str, Any], wrap: Callable[[], Any] | None) -> None:
    known = {name: part for name, part in parts.items() if name in ("model", "data")}
    fake.tft_adopt(known, wrap)


class TakesAnything(Broken):
    """`tft_adopt` silently ignores objects whose names it does not know."""

    instead: ClassVar = {"tft_adopt": _takes_anything}


class NeverTheSame(FakeTraining):
    """
    A training whose result depends on the process.
    """

    def step(self, model: Any, update: Any) -> object:
        """Return another result in each process."""
        super().step(model, update)
        return os.getpid()


def _capture_draws() -> bytes:
    fake._adopted.data.draw()
    return fake.tft_capture()


class CaptureDraws(Broken):
    """A capture moves the data position."""

    instead: ClassVar = {"tft_capture": _capture_draws}


def _other_holders(rank: int, world: int) -> Sequence[ShardCopies]:
    return (ShardCopies(shard="dense", ranks=tuple(range(rank, world))),)


class OtherHolders(Broken):
    """
    Each rank names only itself as the holder of its shard.
    """

    instead: ClassVar = {"tft_shards": _other_holders}


def _digests_of_an_address(shard: str) -> Mapping[str, str]:
    return {"values": str(fake._adopted.data._rank)}


class DigestsOfAnAddress(Broken):
    """
    Digests contain values that differ between processes.
    """

    instead: ClassVar = {"tft_compare": _digests_of_an_address}


def _gives_a_copy(shard: str, step: int) -> ShardPayload:
    return fake.tft_give(shard, step, kept=True)


class DigestsOfACopy(Broken):
    """
    Digests are those of the kept copy instead of the state in use.
    """

    instead: ClassVar = {"tft_compare": None, "tft_give": _gives_a_copy}


def _no_digests(shard: str) -> dict[str, str]:
    return {}


class WithoutDigests(Broken):
    """
    The digests of a shard are empty.
    """

    instead: ClassVar = {"tft_compare": _no_digests}


def _unknown_failure(error: BaseException) -> None:
    return None


class UnknownFailure(Broken):
    """
    An exception of the framework is classified as a bug of the script.
    """

    instead: ClassVar = {"tft_classify": _unknown_failure}


def _gives_too_little(shard: str, step: int, kept: bool) -> ShardPayload:
    given = fake.tft_give(shard, step, kept)
    values = array.array("d", given.buffers[0].view.cast("d"))
    values[99] = 0.0
    buffer = Buffer(name="values", view=memoryview(values).cast("B"))
    return ShardPayload(meta=given.meta, buffers=(buffer,))


class GivesTooLittle(Broken):
    """A part of the state is left out of a transfer."""

    instead: ClassVar = {"tft_give": _gives_too_little}


def _forgets_the_data(local_state: bytes) -> None:
    return None


class ForgetsTheData(Broken):
    """
    A rollback does not restore the data position.
    """

    instead: ClassVar = {"tft_rollback": _forgets_the_data}


def _restores_the_newest(step: int) -> None:
    fake._model().values[:] = fake._adopted.backups[max(fake._adopted.backups)]


class RestoresTheNewest(Broken):
    """
    The newest copy is restored instead of the requested one.
    """

    instead: ClassVar = {"tft_restore": _restores_the_newest}


def _gives_the_present(shard: str, step: int) -> ShardPayload:
    return fake.tft_give(shard, step, kept=False)


class GivesThePresent(Broken):
    """
    A rank gives the state in use instead of the copy of an earlier step.
    """

    instead: ClassVar = {"tft_give": _gives_the_present}


def _changes_while_forming(name: str, host: str, port: int, rank: int, world: int) -> None:
    if not name.endswith("-1"):
        fake._model().values[0] += 1.0
    fake.tft_regroup(name, host, port, rank, world)


class ChangesWhileForming(Broken):
    """
    A rank changes its state while it forms process groups, except for the first time.
    """

    instead: ClassVar = {"tft_regroup": _changes_while_forming}


def _keeps_later_copies(local_state: bytes) -> None:
    fake.tft_rollback(local_state, max(fake._adopted.backups, default=0))


class KeepsLaterCopies(Broken):
    """
    A rollback leaves copies of steps that are computed again.
    """

    instead: ClassVar = {"tft_rollback": _keeps_later_copies}


def _never_waits(frame: object) -> bool:
    return False


class NeverWaits(Broken):
    """
    The adaptor reports that a waiting rank does not wait.
    """

    instead: ClassVar = {"tft_waiting": _never_waits}


def _deaf_to_quiesce() -> None:
    return None


class DeafToQuiesce(Broken):
    """
    A rank stays in its collective after `tft_quiesce`.
    """

    instead: ClassVar = {"tft_quiesce": _deaf_to_quiesce}


def _quiesce_once() -> None:
    if _quiesced:
        raise RuntimeError("called twice")
    _quiesced.append(True)


class QuiesceOnce(Broken):
    """
    A second call of `tft_quiesce` fails.
    """

    instead: ClassVar = {"tft_quiesce": _quiesce_once}


def _saves_half(directory: Path, shard: str) -> Sequence[str]:
    values = array.array("d", fake._model().values)
    values[50] = 0.0
    (directory / f"{shard}.bin").write_bytes(values.tobytes())
    return (f"{shard}.bin",)


class SavesHalf(Broken):
    """
    A checkpoint has only a part of the state.
    """

    instead: ClassVar = {"tft_save": _saves_half}


def _stages_a_view(shard: str) -> Callable[[Path], Sequence[str]]:
    values = fake._model().values

    def write(directory: Path) -> Sequence[str]:
        (directory / f"{shard}.bin").write_bytes(values.tobytes())
        return (f"{shard}.bin",)

    return write


class StagesAView(Broken):
    """
    The staged copy changes while training continues.
    """

    instead: ClassVar = {"tft_stage": _stages_a_view}
