"""
Finds hooks `on_before_optimizer_step` that change parameters, which they must not do: this hook
runs before the update window. It cannot run in the window, because it may use collectives, for
example in `self.log(..., sync_dist=True)`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from tft_pytorch.part_digests import digest

from tft import Session

Trainer = Any  # Lightning's own types are not visible to mypy here

_HOOK = "on_before_optimizer_step"
_SENTENCE = (
    f"the hook {_HOOK} changes parameters, and it runs before the update window of the step: after an "
    "incident that interrupts the step after the change, it is applied a second time. Change "
    "parameters in the window, with optimizer.register_step_post_hook"
)


class HookChanges:
    """
    Compares the parameters before and after the hook `on_before_optimizer_step`, in those steps
    that the session audits.
    """

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session = session
        self._trainer = trainer

    @contextmanager
    def seen(self) -> Iterator[None]:
        """
        Report the hook to the session if parameters change within the `with` block, which runs the
        hook.
        """
        if not self._session.audited or not self._is_there():
            yield
            return
        before = self._parameters()
        yield
        if self._parameters() != before:
            self._session.unkept(_HOOK, _SENTENCE)

    def _is_there(self) -> bool:
        trainer = self._trainer
        module = trainer.lightning_module
        return is_overridden(_HOOK, module) or any(
            is_overridden(_HOOK, each) for each in trainer.callbacks
        )

    def _parameters(self) -> str:
        named = self._trainer.lightning_module.named_parameters()
        return digest(None, {name: each.detach() for name, each in named})
