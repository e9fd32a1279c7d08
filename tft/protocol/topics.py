"""
The topics of the bus: who publishes, who listens.
"""

REPORTS = b"reports"
"""Ranks, agents and the launcher publish their reports; the controller listens."""

BEATS = b"beats"
"""Agents publish the status of their ranks; controller and observers listen."""

ORDERS = b"orders"
"""The controller publishes orders and `Lead`; ranks, agents and the launcher listen."""


def presence(sender: str) -> bytes:
    """
    Subscribed to by `sender` alone, published to by nobody: that the subscription stands is
    the sign that the sender is connected, and its end that the sender has gone.
    """
    return b"presence." + sender.encode()
