"""
The hooks of an adaptor whose ranks are tied together by torch.distributed, whatever is trained.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from tft.adaptor import StateAdaptor, TrainingState
from tft.hooks import LauncherStore, hookimpl
from tft_pytorch.groups import Groups


class TorchState(TrainingState, Protocol):
    """
    What is asked of the training state beside.
    """

    @property
    def on_cuda(self) -> bool: ...

    def updated(self) -> None: ...


class Forming(Protocol):
    """
    As `tft_pytorch.groups.Groups` does it.
    """

    def form(
        self, name: str, host: str, port: int, rank: int, world: int, *, cuda: bool
    ) -> None: ...

    def clear(self) -> None: ...


State = TypeVar("State", bound=TorchState)


class TorchAdaptor(StateAdaptor[State]):
    """
    To be derived from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups = Groups()
        self.contributing: Callable[[], None] | None = None
        """What a step is to call when this rank is about to give the last of its sums to the others."""

    def forming(self) -> Forming:
        """
        What forms the groups of a job, and frees them.
        """
        return self.groups

    # ------------------------------------------------------------ the process

    @hookimpl
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        from tft_pytorch.store import serve

        serve(host, port, opened)

    @hookimpl
    def tft_begun(self) -> str | None:
        import torch.distributed as dist  # heavy, and the script has done so already

        return "a process group (init_process_group)" if dist.is_initialized() else None

    @hookimpl
    def tft_launcher_store(self, host: str, port: int) -> LauncherStore:
        from tft_pytorch.store import TorchrunStore

        return TorchrunStore(host, port)

    # ------------------------------------------------------------ a step

    @hookimpl
    def tft_watch(self, contributing: Callable[[], None]) -> None:
        self.contributing = contributing

    @hookimpl
    def tft_meet(self) -> None:
        self.groups.meet(cuda=self.state().on_cuda)

    @hookimpl
    def tft_updated(self) -> None:
        self.state().updated()

    # ------------------------------------------------------------ groups

    @hookimpl
    def tft_quiesce(self) -> None:
        self.groups.quiesce()

    @hookimpl
    def tft_clear(self) -> None:
        super().tft_clear()
        self.forming().clear()

    @hookimpl
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        self.forming().form(name, host, port, rank, world, cuda=self.state().on_cuda)
