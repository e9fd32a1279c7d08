"""
The settings of all ZeroMQ sockets of the bus, in participants and in the broker. This file imports
no messages, so the broker, which imports this file, starts in half the time.
"""

import zmq

from tft.protocol.frames import FRAME_LIMIT

Socket = zmq.Socket[bytes]

HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1500
"""
The time in milliseconds after which ZeroMQ closes the connection to a peer that answers no
heartbeat of ZeroMQ. So the loss of a peer is noticed within two seconds.
ZeroMQ's own thread answers these heartbeats, even while the Python code of the process is busy or
blocked. A stopped process, a dead machine and a broken network do not answer.
"""

RECONNECT_MS = 20
RECONNECT_MAX_MS = 200
"""The longest time in milliseconds between two tries to connect. With this limit a participant
finds a restarted broker soon, but tries only five times a second while there is no broker."""

CONNECT_TIMEOUT_MS = 1000
"""The time in milliseconds after which a try to connect is given up and repeated. Without this
limit, the kernel would wait longer and longer between its tries to connect to a silent machine."""

MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
"""The error code in ZeroMQ's event for a failed handshake if one side of the connection uses
encryption and the other side does not."""


def tuned(context: zmq.Context[Socket], kind: zmq.SocketType) -> Socket:
    """
    Return a new socket with the settings that every bus socket uses, in participants and in the
    broker.
    """
    socket = context.socket(kind)
    socket.linger = 0
    # No high-water mark (limit of ZeroMQ's message queues). With a limit, messages for a slow
    # subscriber would be dropped silently, or (with XPUB_NODROP) every sender would wait for the
    # slowest subscriber. Without a limit, messages wait in the memory of the slow subscriber, or in
    # the broker until missing heartbeats end the connection.
    socket.set_hwm(0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    return socket
