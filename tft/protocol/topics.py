"""
The topics of the bus. A message reaches the processes that subscribe to its topic. For each topic,
this file says which processes publish messages on the topic and which processes subscribe to it.
"""

from urllib.parse import quote

REPORTS = b"reports"
"""Ranks, agents, the launcher and commands of `tft` publish their reports on this topic. The
controller subscribes to it."""

BEATS = b"beats"
"""Agents publish the status of their ranks (`Beat`) on this topic, and ranks say where they stand
(`Whereabouts`). The controller and commands that look at the job, such as `tft status`, subscribe
to it."""

ORDERS = b"orders"
"""The controller publishes its orders, its announcement that it leads (`Lead`), and its questions
to the ranks (`Inquire`) on this topic.
Ranks, agents, the launcher and commands of `tft` subscribe to it."""


NEWS = b"news"
"""The controller publishes sentences for people (`News`) on this topic. The launcher that runs the
controller and commands that look at the job, such as `tft top`, subscribe to it."""


def agent(node: int) -> bytes:
    """
    Return the topic of the agent of a node. Other agents publish messages to this agent on the
    topic, and only this agent subscribes to the topic.
    """
    return b"agent." + str(node).encode()


def presence(job: str, sender: str) -> bytes:
    """
    Return the presence topic of the process of `job` that is called `sender` on the bus. With an
    empty `sender`, return how the presence topics of the job begin.

    Only `sender` subscribes to this topic, and no process publishes on it. The topic shows other
    processes whether `sender` is connected to the bus: it is while the subscription exists.
    """
    # quote the name of the job, so that a `/` in the name is not taken for the `/` before the
    # sender
    return f"presence.{quote(job, safe='')}/{sender}".encode()
