"""
tft: a distributed training job that survives the loss of its processes.

In a training script: ``session = tft.init()``, ``session.adopt(...)``, ``session.run(train)``.
"""

from typing import TYPE_CHECKING, Any

from tft.errors import JobEnded, TftError

if TYPE_CHECKING:
    from tft.spi.faults import TrainingFault
    from tft.worker.joining import init
    from tft.worker.launchers import Launcher
    from tft.worker.session import Session

__all__ = ["JobEnded", "Launcher", "Session", "TftError", "TrainingFault", "init"]


def __getattr__(name: str) -> Any:  # Any: the attributes of a module have no common type
    """
    Return an attribute of the package that another module defines. That module is imported only
    when the attribute is first used. So processes that import `tft` and need no code for training
    scripts, such as the broker, start faster.
    """
    if name == "init":
        from tft.worker.joining import init

        return init
    if name == "Session":
        from tft.worker.session import Session

        return Session
    if name == "Launcher":
        from tft.worker.launchers import Launcher

        return Launcher
    if name == "TrainingFault":
        from tft.spi.faults import TrainingFault

        return TrainingFault
    raise AttributeError(f"module 'tft' has no attribute {name!r}")
