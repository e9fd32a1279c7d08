"""
The adaptor for Megatron, as an entry point names it: what it answers beside what every adaptor on
torch.distributed does. The work is done in the other modules.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft_pytorch.hooks import TorchAdaptor

from tft.hooks import Diagnosis, hookimpl
from tft.protocol.messages import FaultKind
from tft_megatron.adopted import Adopted, adopt
from tft_megatron.arguments import enabled
from tft_megatron.faults import classify, waiting
from tft_megatron.groups import Parallel


class Adaptor(TorchAdaptor[Adopted]):
    """
    Of this process.
    """

    hands_over = "tft_megatron.enable"

    def __init__(self) -> None:
        super().__init__()
        self.parallel = Parallel(self.groups)

    def forming(self) -> Parallel:
        """
        All of Megatron's groups together.
        """
        return self.parallel

    @hookimpl
    def tft_strategies(self) -> Sequence[str]:
        return enabled()

    @hookimpl
    def tft_preload(self) -> None:
        from tft_megatron.preload import preload  # seconds: only processes that train need it

        preload()

    @hookimpl
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the user's own objects, checked by `adopt`
        wrap: Callable[[], Any] | None,
    ) -> None:
        self.adopted = adopt(parts, wrap, self.parallel, self.contributing)

    # ------------------------------------------------------------ checkpoints

    @hookimpl
    def tft_save(self, directory: Path, shard: str, step: int) -> Sequence[str]:
        return self.state().save(directory, shard, step)

    @hookimpl
    def tft_stage(self, shard: str, step: int) -> Callable[[Path], Sequence[str]]:
        return self.state().stage(shard, step)

    @hookimpl
    def tft_join(self, directory: Path, files: Sequence[str]) -> Sequence[str]:
        from tft_megatron.checkpoints import join  # late: it brings megatron-core, see preload.py

        return join(directory, files)

    @hookimpl
    def tft_newest(self, directory: Path, newest: Path | None, step: int) -> None:
        from tft_megatron.checkpoints import point

        point(directory, newest, step)

    @hookimpl
    def tft_beside(self) -> bytes:
        self.state()
        return b""  # the script's own objects have everything

    @hookimpl
    def tft_replaced(self) -> None:
        self.state().replaced()

    # ------------------------------------------------------------ faults

    @hookimpl
    def tft_waiting(self, frame: FrameType) -> bool:
        return waiting(frame)

    @hookimpl
    def tft_classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        return classify(error)


adaptor = Adaptor()
