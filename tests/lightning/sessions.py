"""
A session that only gathers what it is told.
"""

from collections.abc import Callable


class Session:
    """
    Gathers the reports of state that is not kept. `says` takes the name of such state, and returns a
    text that the sentence about it must have.
    """

    def __init__(self, says: Callable[[str], str], *, audited: bool) -> None:
        self.told: list[str] = []
        self.audited = audited
        self._says = says

    def unkept(self, what: str, sentence: str) -> None:
        """Note what was reported."""
        assert self._says(what) in sentence
        self.told.append(what)
