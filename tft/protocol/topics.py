"""
The topics of the bus: the processes that publish on each, and those that listen.
"""

REPORTS = b"reports"
"""Ranks, agents, the launcher and commands of `tft` publish their reports; the controller
listens."""

BEATS = b"beats"
"""Agents publish the status of their ranks; controller and observers listen."""

ORDERS = b"orders"
"""The controller publishes orders and `Lead`; ranks, agents, the launcher and commands of `tft`
listen."""


def presence(sender: str) -> bytes:
    """
    Return the presence topic of `sender`. Only `sender` subscribes to it, and no process publishes
    on it.

    An existing subscription shows that the sender is connected; its end shows that the sender has
    gone.
    """
    return b"presence." + sender.encode()
