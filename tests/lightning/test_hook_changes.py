"""
A hook that changes parameters before the update window is named.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from tft_lightning.hook_changes import HookChanges
from torch import nn

from tests.lightning.sessions import Session


class Net(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    A layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Clamping(Callback):  # type: ignore[misc]  # it has no types here
    """
    Has the hook.
    """

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Clamp the parameters, as people write it."""
        for each in pl_module.parameters():
            each.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("audited", "changes", "told"),
    [(True, True, ["on_before_optimizer_step"]), (True, False, []), (False, True, [])],
)
def test_a_hook_that_changes_parameters_is_named(
    audited: bool, changes: bool, told: list[str]
) -> None:
    """When the hook changes parameters in an audited step, then it is named. A hook that does not is
    not named, and other steps are not looked at."""
    session = Session(lambda what: "register_step_post_hook", audited=audited)
    hook, module = Clamping(), Net()
    trainer = SimpleNamespace(lightning_module=module, callbacks=[hook])
    with HookChanges(session, trainer).seen():  # type: ignore[arg-type]
        module.layer.weight.grad = torch.ones(2, 2)
        if changes:
            hook.on_before_optimizer_step(trainer, module, None)
    assert session.told == told
