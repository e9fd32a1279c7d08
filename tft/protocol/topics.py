"""
The topics of the bus. For each topic, this file says which processes publish on it and which
processes subscribe to it.
"""

REPORTS = b"reports"
"""Ranks, agents, the launcher and commands of `tft` publish their reports on this topic. The
controller subscribes to it."""

BEATS = b"beats"
"""Agents publish the status of their ranks (`Beat`) on this topic. The controller subscribes to it.
"""

ORDERS = b"orders"
"""The controller publishes its orders and `Lead` on this topic. Ranks, agents, the launcher and
commands of `tft` subscribe to it."""


def agent(node: int) -> bytes:
    """
    Return the topic of the agent of a node. Other agents publish messages to this agent on it, and
    only this agent subscribes to it.
    """
    return b"agent." + str(node).encode()


def presence(sender: str) -> bytes:
    """
    Return the presence topic of the participant `sender`.

    Only `sender` subscribes to this topic, and no process publishes on it. While the subscription
    exists, `sender` is connected to the bus. When the subscription ends, `sender` has gone.
    """
    return b"presence." + sender.encode()
