"""
Decides on one rank, before the update of each step, whether the loss and the norm of the gradients
are wrong.
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
"""A value is a spike if it is more than this number of deviations above the median of earlier
values. In ordinary training, single values are up to 10 deviations above the median."""

_NORM = "the norm of the gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    The settings of this plugin, as `tft run` passes them to every process.
    """

    mode: Mode
    spike: float = SPIKE
    """A value is a spike if it is more than this number of deviations above the median. 0 means
    that no value is a spike."""
    limit: float | None = None
    """The largest norm of the gradients that is not refused. None means that there is no limit."""


class Judge:
    """
    The observer of one rank, whose methods tft calls during training. The observer refuses the
    update of a step whose loss or norm of the gradients is wrong.

    The norm of the gradients is the same on all ranks that hold the same parameters, and these
    ranks must judge the norm alike. So they must know the same norms of earlier steps. A
    replacement process knows no earlier norms. So when a process was replaced, all ranks forget the
    norms and losses of earlier steps.
    """

    def __init__(self, session: SessionView, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._losses: list[History] = []
        """The losses of earlier steps, by the place of their backward pass in the step: a script may
        have several losses of different kinds, each with a backward pass of its own."""
        self._passes = 0
        """The number of losses of the present step that were judged so far."""
        self._norms = History()
        self._found: list[str] = []
        """Texts that say which losses of the present step are wrong, and why."""
        self._incarnations: Mapping[int, int] = {}

    def tft_on_loss(self, step: int, loss: float) -> bool:
        """
        Return whether the update must be refused because of a loss of this rank.
        """
        why = self._wrong("the loss", loss, self._losses_at(self._passes))
        self._passes += 1
        if why:
            self._found.append(why)
        return bool(why) and self._settings.mode == "refuse"

    def tft_on_window_opening(self, step: int, numbers: Numbers) -> None:
        """
        Judge the losses and the norm of `step`. If one of them is wrong, raise a `TrainingFault` to
        refuse the update, or only log the finding if the mode is `watch`.

        If the update is not refused, remember the losses and the norm, to judge later steps.
        """
        found, self._found, self._passes = self._found, [], 0
        if not found and numbers.norm is not None:
            found = self._wrong_norm(numbers.norm, numbers.own)
        if found:
            why = f"{'; '.join(found)} in step {step}"
            if self._settings.mode == "refuse":
                raise TrainingFault(why, kind="numeric")
            log.warning("numbers_suspect", step=step, why=why)
        for place, loss in enumerate(numbers.losses):
            self._losses_at(place).add(step, loss)
        if numbers.norm is not None:
            self._norms.add(step, numbers.norm)

    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        Before a `regroup` order (form the process groups again), forget the losses and norms of
        `step` and later steps, because these steps are computed again. Forget all losses and norms
        if a process was replaced.
        """
        # an adaptor may have a backward pass of its own while it builds wrappers, before `resume`
        self._passes = 0
        if order != "regroup":
            return
        self._found = []
        replaced = self._session.incarnations != self._incarnations
        self._incarnations = dict(self._session.incarnations)
        for history in (*self._losses, self._norms):
            history.back_to(step)
            if replaced:
                history.clear()

    def _losses_at(self, place: int) -> History:
        while place >= len(self._losses):
            self._losses.append(History())
        return self._losses[place]

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
        Return a text that says what is wrong with the value of the number `name`, or an empty text
        if nothing is wrong. `history` has the earlier values of this number.
        """
        if not math.isfinite(value):
            return f"{name} is {value}"
        if self._settings.spike:
            limit = history.limit(value, self._settings.spike)
            if limit is not None:
                return f"{name} is {value:g}, and a spike begins at {limit:g}"
        return ""
