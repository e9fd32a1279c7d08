"""
The part of the training state that is in no tensor and equal on all ranks: the number of the last
step, and the metrics of that step.
"""

from collections.abc import Mapping
from typing import Any


class Progress:
    """
    The factory passes this object to tft in the field `others` of `Made`, so it is a part of the
    state that is equal on all ranks. It changes only in the update window.
    """

    def __init__(self) -> None:
        self.step = 0
        """The number of the last complete step, as TorchTitan counts: a run that continues from
        TorchTitan's checkpoint of step 25 begins with 25."""
        self.row: dict[str, Any] = {}
        """The arguments `args` and `kwargs` with which the metrics of the last step are logged.
        Empty if TorchTitan logs no metrics for this step."""

    def state_dict(self) -> dict[str, Any]:
        """
        Return the state as plain values.
        """
        return {"step": self.step, "row": self.row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Take a state that `state_dict` has returned on this or another rank.
        """
        self.step, self.row = state["step"], dict(state["row"])
