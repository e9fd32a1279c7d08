"""
The topics of the bus. For each topic, this file says which processes publish on it and which
processes subscribe to it.
"""

REPORTS = b"reports"
"""Ranks, agents, the launcher and commands of `tft` publish their reports; the controller
listens."""

BEATS = b"beats"
"""Agents publish the status of their ranks; controller and observers listen."""

ORDERS = b"orders"
"""The controller publishes orders and `Lead`; ranks, agents, the launcher and commands of `tft`
listen."""


def agent(node: int) -> bytes:
    """
    Return the topic of the agent of a node. Other agents publish on it; only this agent listens.
    """
    return b"agent." + str(node).encode()


def presence(sender: str) -> bytes:
    """
    Return the presence topic of the participant `sender`.

    Only `sender` subscribes to this topic, and no process publishes on it. While the subscription
    exists, `sender` is connected to the bus. When the subscription ends, `sender` has gone.
    """
    return b"presence." + sender.encode()
