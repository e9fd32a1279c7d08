"""
The adaptor for PyTorch, as an entry point names it: what it answers beside what every adaptor on
torch.distributed does. The work is done in the other modules.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft.errors import UsageError
from tft.hooks import hookimpl
from tft.protocol.messages import FaultKind
from tft_pytorch.adopted import Adopted, adopt
from tft_pytorch.faults import classify, waiting
from tft_pytorch.hooks import TorchAdaptor
from tft_pytorch.made import Maker, adopt_make


class Adaptor(TorchAdaptor[Adopted | Maker]):
    """
    Of this process.
    """

    @hookimpl
    def tft_strategies(self) -> Sequence[str]:
        return ("retry", "recover", "dump")

    @hookimpl
    def tft_preload(self) -> None:
        from tft_pytorch.preload import preload  # takes a second: only processes that train need it

        preload()

    @hookimpl
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
        wrap: Callable[[], Any] | None,
    ) -> None:
        take_charge = adopt_make if "make" in parts else adopt
        self.adopted = take_charge(parts, wrap, self.contributing)

    # ------------------------------------------------------------ checkpoints

    @hookimpl
    def tft_save(self, directory: Path, shard: str) -> Sequence[str]:
        return self.state().save(directory, shard)

    @hookimpl
    def tft_stage(self, shard: str) -> Callable[[Path], Sequence[str]]:
        return self.state().stage(shard)

    @hookimpl
    def tft_join(self, directory: Path, files: Sequence[str]) -> Sequence[str]:
        from tft_pytorch.checkpoints import join  # late: a second of imports, see preload.py

        return join(directory, files)

    @hookimpl
    def tft_beside(self, shard: str) -> bytes:
        return self._plain_state().beside(shard)

    @hookimpl
    def tft_replaced(self, shard: str, beside: bytes) -> None:
        self._plain_state().replaced(shard, beside)

    def _plain_state(self) -> Adopted:
        state = self.state()
        if not isinstance(state, Adopted):
            raise UsageError("what make makes is not written by functions of the script's own")
        return state

    # ------------------------------------------------------------ faults

    @hookimpl
    def tft_waiting(self, frame: FrameType) -> bool:
        return waiting(frame)

    @hookimpl
    def tft_classify(self, error: BaseException) -> FaultKind | None:
        return classify(error)


adaptor = Adaptor()
