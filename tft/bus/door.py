"""
Who is let in: the broker asks here for every connection, and here is written down who was refused.

ZeroMQ's own rule is that whoever knows the broker's public key may come in. With a handler of its
protocol ZAP it asks about each; here that is a thread beside the proxy, which never looks at a message.
"""

import os
import threading

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tft.bus.zeromq import MISMATCH, Socket
from tft.keys import Keys

log = structlog.get_logger()

_HANDLER = "inproc://zeromq.zap.01"
"""Where libzmq looks for it."""
_DOMAIN = "tft"
_FAILED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""Of those that never come to be asked about. Their address cannot be told: the event has none, and the
descriptor that an earlier one had may be another connection's by the time it is looked at."""
_REMEMBERED = 1000
"""Who was refused, and why, is said once: a process that is not let in tries again every second."""


class Door:
    """
    Of a broker's sockets, which must not be bound yet.
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
            each.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody is let in
            each.monitor(f"inproc://door-{number}", _FAILED)
            failures = context.socket(zmq.PAIR)
            failures.linger = 0
            failures.set_hwm(0)  # a full one would hold up the thread that serves all connections
            failures.connect(f"inproc://door-{number}")
            self._failures.append(failures)

    def open(self) -> None:
        """
        From now on whoever has knocked is answered, until the context is terminated.
        """
        threading.Thread(target=self._keep, name="door", daemon=True).start()

    def close(self) -> None:
        """
        For a door that was not opened.
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
            os._exit(70)  # nobody could come in any more: the broker is started again

    def _answer(self) -> None:
        version, number, _, address, _, mechanism, *credentials = self._asked.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._member]
        if not known:
            self._tell(address.decode(errors="replace"), "it has no key of this job")
        status = (b"200", b"OK") if known else (b"400", b"no key of this job")
        self._asked.send_multipart([version, number, *status, b"", b""])

    def _look(self, failures: Socket) -> None:
        seen = parse_monitor_message(failures.recv_multipart())
        if seen["event"] == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._tell("unknown", "it left before it had shown a key")
        elif seen["value"] == MISMATCH:
            self._tell("unknown", "it does not encrypt")
        else:
            self._tell("unknown", "it has keys of another job, or is none of tft")

    def _tell(self, peer: str, why: str) -> None:
        if (peer, why) in self._told:
            return
        if len(self._told) == _REMEMBERED:
            self._told.pop(next(iter(self._told)))
        self._told[peer, why] = None
        log.warning("peer_refused", peer=peer, why=why)
