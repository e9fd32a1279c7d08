"""
tft: a distributed training job that survives the loss of its processes.

In a training script: ``session = tft.init()``, ``session.adopt(...)``, ``session.run(train)``.
"""

from typing import TYPE_CHECKING, Any

from tft.errors import JobEnded, TftError

if TYPE_CHECKING:
    from tft.spi.faults import TrainingFault
    from tft.worker.launchers import Launcher
    from tft.worker.session import Session, init

__all__ = ["JobEnded", "Launcher", "Session", "TftError", "TrainingFault", "init"]


def __getattr__(name: str) -> Any:  # Any: the attributes of a module have no common type
    """
    Return an attribute of the package that another module defines, and import that module only now.
    The broker, for example, imports `tft` too, and does not need the code for training scripts.
    """
    if name in ("Session", "init"):
        from tft.worker import session

        return getattr(session, name)
    if name == "Launcher":
        from tft.worker.launchers import Launcher

        return Launcher
    if name == "TrainingFault":
        from tft.spi.faults import TrainingFault

        return TrainingFault
    raise AttributeError(f"module 'tft' has no attribute {name!r}")
