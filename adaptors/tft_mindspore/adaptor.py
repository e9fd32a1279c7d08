"""
The adaptor for MindSpore, as an entry point names it. The work is done in the other modules. The process of the
rendezvous store has no use for MindSpore, so nothing of it, nor numpy, is imported before it is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tft.adaptor import StateAdaptor
from tft.hooks import hookimpl
from tft.protocol.messages import FaultKind

if TYPE_CHECKING:
    from tft_mindspore.adopted import Adopted  # noqa: F401 (of the base class, in quotes)
    from tft_mindspore.callback import TrainFaultTolerance
    from tft_mindspore.groups import Groups

_STRATEGIES = ("retry", "recover", "dump")


class Adaptor(StateAdaptor["Adopted"]):
    """
    Of this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model_train: TrainFaultTolerance | None = None
        """Of a script that trains with `Model.train`: it says what is enabled, and writes last checkpoints."""
        self._groups: Groups | None = None

    def groups(self) -> "Groups":
        """
        Where groups are formed.
        """
        if self._groups is None:
            from tft_mindspore.groups import Groups

            self._groups = Groups()
        return self._groups

    # ------------------------------------------------------------ the process

    @hookimpl
    def tft_strategies(self) -> Sequence[str]:
        if self.model_train is None:
            return _STRATEGIES
        return tuple(each for each in _STRATEGIES if each in self.model_train.strategies)

    @hookimpl
    def tft_preload(self) -> None:
        from tft_mindspore.preload import preload

        preload()

    @hookimpl
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        from tft_mindspore.store import serve

        serve(host, port, opened)

    @hookimpl
    def tft_begun(self) -> str | None:
        from tft_mindspore.adopted import begun

        return begun()

    # ------------------------------------------------------------ the state

    @hookimpl
    def tft_watch(self, contributing: Callable[[], None]) -> None:
        self.groups().contributing = contributing

    @hookimpl
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
        wrap: Callable[[], Any] | None,
    ) -> None:
        from tft_mindspore.adopted import adopt

        self.adopted = adopt(parts, wrap)

    # ------------------------------------------------------------ groups

    @hookimpl
    def tft_meet(self) -> None:
        self.groups().present.barrier()

    @hookimpl
    def tft_quiesce(self) -> None:
        self.groups().quiesce()

    @hookimpl
    def tft_waiting(self, frame: FrameType) -> bool:
        from tft_mindspore.faults import waiting

        return waiting(frame)

    @hookimpl
    def tft_clear(self) -> None:
        super().tft_clear()
        self.groups().clear()

    @hookimpl
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        self.groups().form(name, host, port, rank, world)

    # ------------------------------------------------------------ checkpoints

    @hookimpl
    def tft_save(self, directory: Path, shard: str, step: int) -> Sequence[str]:
        if self.model_train is not None:
            return self.model_train.save(directory, shard, step)
        return self.state().save(directory, shard, step)

    @hookimpl
    def tft_join(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        return () if self.model_train is None else self.model_train.rename(directory, files, step)

    @hookimpl
    def tft_stage(self, shard: str, step: int) -> Callable[[Path], Sequence[str]]:
        return self.state().stage(shard, step)

    @hookimpl
    def tft_load(self, directory: Path, shard: str) -> None:
        if self.model_train is not None and self.model_train.has_saved(directory, shard):
            return  # it has read its own file before it trains
        super().tft_load(directory, shard)

    # ------------------------------------------------------------ faults

    @hookimpl
    def tft_classify(self, error: BaseException) -> FaultKind | None:
        from tft_mindspore.faults import classify

        return classify(error)


adaptor = Adaptor()
