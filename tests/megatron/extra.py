"""
A module with an extra state, for the Megatron tests.
"""

from torch import nn


class Counter(nn.Module):
    """
    A module whose extra state is a count.
    """

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> object:
        """
        Return the count.
        """
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """
        Replace the count.
        """
        self.count = state["count"]
