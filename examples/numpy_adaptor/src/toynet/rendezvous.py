"""
The rendezvous: a small server through which the ranks of a group find each other.

A request is one line of JSON, and so is its answer:

    {"put": KEY, "value": TEXT}    store the text under the key; the answer is null
    {"get": KEY}                   the answer is the text, as soon as the key has one
"""

import json
import socket
import socketserver
import threading


class Rendezvous(socketserver.ThreadingTCPServer):
    """
    The server. Call `serve_forever` to run it.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Conversation)
        self._texts: dict[str, str] = {}
        self._news = threading.Condition()

    def put(self, key: str, value: str) -> None:
        """
        Keep a text under a key.
        """
        with self._news:
            self._texts[key] = value
            self._news.notify_all()

    def get(self, key: str) -> str:
        """
        Wait for the text under a key, and return it.
        """
        with self._news:
            self._news.wait_for(lambda: key in self._texts)
            return self._texts[key]


class _Conversation(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Rendezvous)
        for line in self.rfile:
            question = json.loads(line)
            if "put" in question:
                self.server.put(question["put"], question["value"])
                answer = None
            else:
                answer = self.server.get(question["get"])
            self.wfile.write(json.dumps(answer).encode() + b"\n")


def ask(connection: socket.socket, **question: str) -> str | None:
    """
    Ask the server at the other end of a connection. Raises `ConnectionError` when it has gone.
    """
    connection.sendall(json.dumps(question).encode() + b"\n")
    with connection.makefile("rb") as answers:  # each answer is one line, and nothing follows it
        line = answers.readline()
    if not line:
        raise ConnectionError("the rendezvous has closed the connection")
    answer: str | None = json.loads(line)
    return answer
