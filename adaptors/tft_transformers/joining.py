"""
The functions that a script calls to train with tft: `tft_transformers.init` and
`tft_transformers.prepare`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tft
from tft.errors import UsageError
from tft_transformers.versions import check_versions

if TYPE_CHECKING:
    from tft import Session

_joined: "list[Session]" = []
"""The session of this process, once `init` was called."""
_prepared: list[Any] = []  # Any: `Trainer` is not imported here
"""The Trainer of this process, once `prepare` was called."""


def init(options: Sequence[str] = ()) -> "Session":
    """
    Join the job for which this process was started, and return its session. Call this function
    before `TrainingArguments` are made: these look for a process group, and would make their own if
    `init` had not made one that stands in.

    `options` are as in `tft.init`. Raises `UsageError` if Transformers or accelerate has another
    version than this adaptor was written for, or if there is a process group already.
    """
    import torch.distributed as dist

    from tft_transformers.standin import stand_in

    if _joined:
        return _joined[0]
    check_versions()
    session = tft.init(options=options)
    if dist.is_initialized():
        raise UsageError(
            "a process group exists before tft_transformers.init(): call init at the beginning of "
            "the script, before TrainingArguments or an Accelerator is made"
        )
    stand_in(session.rank, session.world)
    _joined.append(session)
    return session


# Any: transformers.Trainer, which has no types, or a subclass
def prepare(trainer: Any, *, limit: float = 3600.0) -> Any:
    """
    Make `trainer`, a `transformers.Trainer` or an object of a subclass, survive incidents in its
    `train()`. Return `trainer`. A rank whose evaluation or checkpoint takes longer than `limit`
    seconds counts as hanging.

    Raises `UsageError` if `init` was not called, if another Trainer was prepared before, or if the
    trainer has settings with which it cannot survive incidents.
    """
    from tft_transformers.refusals import check
    from tft_transformers.trainer import make_fault_tolerant

    if not _joined:
        raise UsageError(
            "tft_transformers.prepare was called before tft_transformers.init: call init at the "
            "beginning of the script, before TrainingArguments are made"
        )
    if not limit > 0:
        raise UsageError(f"limit must be a number of seconds above 0, but it is {limit}")
    if _prepared:
        raise UsageError(
            "tft_transformers.prepare was called a second time: a job trains with one Trainer, once. "
            "Train with a further Trainer in another job"
        )
    check(trainer, _joined[0].world)
    _prepared.append(trainer)
    make_fault_tolerant(trainer, _joined[0], limit)
    return trainer
