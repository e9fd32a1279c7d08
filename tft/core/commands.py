"""
What the job machine asks for, beside the orders of the protocol.
"""

from dataclasses import dataclass

from tft.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOver:
    """
    Nothing is left to be done: write the report and leave with `code`.
    """

    result: str
    """`completed`, `dumped`, `failed` or `cancelled`."""
    code: int
    """The exit code of `tft run`."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """
    Something an operator wants to read: an event and its facts.
    """

    event: str
    facts: dict[str, object]


Command = Order | JobOver | Tell
