"""
Judges the losses and the gradient norm of each step on one rank, before the update.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import structlog

from tft.spi import Numbers, OrderName, SessionView, TrainingFault
from tft_numerics.history import History

log = structlog.get_logger()

Mode = Literal["watch", "refuse"]
MODES: tuple[Mode, ...] = get_args(Mode)
SPIKE = 20.0
"""A value that is this many deviations above the median is a spike. In ordinary training single
values are up to 10 deviations above the median."""

_NORM = "the norm of the gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    The values of the `--numerics` options of `tft run`, which every process of the job gets.
    """

    mode: Mode
    spike: float = SPIKE
    """A value that is this many deviations above the median is a spike. 0: no value is a spike."""
    limit: float | None = None
    """The largest norm of the gradients that is accepted. None: there is no limit."""


class Judge:
    """
    Judges the numbers of one rank, in hooks of the session.

    Ranks with the same parameters must come to the same judgement. They have the same gradient
    norm, but must also know the same norms of earlier steps. A process that replaces another one
    knows no earlier norms. So all ranks forget their earlier numbers when a process is replaced.
    """

    def __init__(self, session: SessionView, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._losses = History()
        self._norms = History()
        self._found: list[str] = []
        """Texts that say what is wrong with the losses of the present step."""
        self._incarnations: Mapping[int, int] = {}

    def tft_on_loss(self, step: int, loss: float) -> bool:
        """
        Return True if this loss of this rank is wrong and the update must be refused.
        """
        why = self._wrong("the loss", loss, self._losses)
        if why:
            self._found.append(why)
        return bool(why) and self._settings.mode == "refuse"

    def tft_on_window_opening(self, step: int, numbers: Numbers) -> None:
        """
        Raise a `TrainingFault` to refuse the update if a loss or the gradient norm is wrong. In the
        mode `watch`, log it instead. Keep the numbers of an accepted step for later judgements.
        """
        found, self._found = self._found, []
        if not found and numbers.norm is not None:
            found = self._wrong_norm(numbers.norm, numbers.own)
        if found:
            why = f"{'; '.join(found)} in step {step}"
            if self._settings.mode == "refuse":
                raise TrainingFault(why, kind="numeric")
            log.warning("numbers_suspect", step=step, why=why)
        for loss in numbers.losses:
            self._losses.add(step, loss)
        if numbers.norm is not None:
            self._norms.add(step, numbers.norm)

    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        Forget the numbers of steps that are computed again. If a process was replaced, forget all
        numbers, because the new process has none.
        """
        if order != "regroup":
            return
        self._found = []
        replaced = self._session.incarnations != self._incarnations
        self._incarnations = dict(self._session.incarnations)
        for history in (self._losses, self._norms):
            history.back_to(step)
            if replaced:
                history.clear()

    def _wrong_norm(self, norm: float, own: Sequence[float]) -> list[str]:
        if not math.isfinite(norm):
            alone = not all(map(math.isfinite, own))
            what = "a gradient that this rank has computed alone" if alone else _NORM
            return [f"{what} is not finite"]
        limit = self._settings.limit
        if limit is not None and norm > limit:
            return [f"{_NORM} is {norm:g}, and --numerics-limit is {limit:g}"]
        why = self._wrong(_NORM, norm, self._norms)
        return [why] if why else []

    def _wrong(self, name: str, value: float, history: History) -> str:
        """
        Return a text that says what is wrong with a value, or "" if the value is not wrong.
        """
        if not math.isfinite(value):
            return f"{name} is {value}"
        if self._settings.spike:
            limit = history.limit(value, self._settings.spike)
            if limit is not None:
                return f"{name} is {value:g}, and a spike begins at {limit:g}"
        return ""
