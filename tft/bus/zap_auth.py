"""
The authentication of connections to the broker.

By default, ZeroMQ accepts every peer (connecting process) that knows the broker's public key. With
ZeroMQ's authentication protocol ZAP, a program installs a handler that accepts or refuses each
peer. The handler in this file accepts only peers with the job's key, and logs the refused peers.

The handler runs in a thread of the broker's process. It sees only connection attempts, never a
message of the bus.
"""

import os
import threading

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tft.bus.sockets import MISMATCH, Socket
from tft.keys import Keys

log = structlog.get_logger()

_HANDLER = "inproc://zeromq.zap.01"
"""The address at which libzmq (ZeroMQ's library) looks for the ZAP handler."""
_DOMAIN = "tft"
_FAILED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""The events that libzmq reports for connections that fail before it asks the handler. The log does
not name the peer of such a connection, because the event does not contain the peer's address."""
_REMEMBERED = 1000
"""The highest number of refused peers that are remembered. A refused process tries to connect again
every second, and a remembered refusal is not logged again."""


class ZapAuthenticator:
    """
    The ZAP handler, which accepts or refuses each connection to the broker's sockets.

    `guarded` are the broker's sockets. They must not be bound yet when this object is created.
    """

    def __init__(self, context: zmq.Context[Socket], keys: Keys, *guarded: Socket) -> None:
        self._member = z85.decode(keys.public)
        self._asked = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(_HANDLER)
        self._told: dict[tuple[str, str], None] = {}
        self._failures: list[Socket] = []
        for number, each in enumerate(guarded):
            each.curve_server = True
            each.curve_secretkey = keys.broker_secret
            each.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
            # without the option ZAP_ENFORCE_DOMAIN, libzmq would accept every peer until the thread
            # of the ZAP handler runs
            each.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            each.monitor(f"inproc://authenticator-{number}", _FAILED)
            failures = context.socket(zmq.PAIR)
            failures.linger = 0
            # 0 means no limit of queued events: a full queue would block libzmq's network thread
            failures.set_hwm(0)
            failures.connect(f"inproc://authenticator-{number}")
            self._failures.append(failures)

    def open(self) -> None:
        """
        Start the thread that accepts or refuses connections.

        The thread also decides about connections that are waiting already. The thread ends when the
        ZeroMQ context is terminated.
        """
        threading.Thread(target=self._keep, name="authenticator", daemon=True).start()

    def close(self) -> None:
        """
        Close the handler's sockets. Call this only if `open` was not called.
        """
        self._asked.close()
        for failures in self._failures:
            failures.close()

    def _keep(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        for failures in self._failures:
            poller.register(failures, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._asked in ready:
                    self._answer()
                for failures in self._failures:
                    if failures in ready:
                        self._look(failures)
        except zmq.ContextTerminated:
            self.close()
        except BaseException:
            log.critical("door_fell_shut", exc_info=True)
            # end the process of the broker: without the thread of the ZAP handler, the broker would
            # accept nobody. `tft run` then starts another broker
            os._exit(70)

    def _answer(self) -> None:
        version, number, _, address, _, mechanism, *credentials = self._asked.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._member]
        if not known:
            self._tell(address.decode(errors="replace"), "the process has no key of this job")
        status = (b"200", b"OK") if known else (b"400", b"no key of this job")
        self._asked.send_multipart([version, number, *status, b"", b""])

    def _look(self, failures: Socket) -> None:
        seen = parse_monitor_message(failures.recv_multipart())
        if seen["event"] == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._tell("unknown", "the process left before it had shown a key")
        elif seen["value"] == MISMATCH:
            self._tell("unknown", "the process does not use encryption")
        else:
            self._tell("unknown", "the process has keys of another job, or is not a process of tft")

    def _tell(self, peer: str, why: str) -> None:
        if (peer, why) in self._told:
            return
        if len(self._told) == _REMEMBERED:
            self._told.pop(next(iter(self._told)))
        self._told[peer, why] = None
        log.warning("peer_refused", peer=peer, why=why)
