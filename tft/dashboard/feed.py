"""
The browsers that watch a page, and the messages that wait for each of them.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tft.dashboard.page import Message, Page, encoded
from tft.dashboard.view import View

WAITING = 40
"""The maximum number of messages that wait for one browser: about the messages of 20 s. A browser
that falls further behind is disconnected. It gets the whole page when it connects again."""
MOST = 100
"""The maximum number of browsers that are connected at the same time."""


class Client:
    """
    One connected browser, with the messages that wait to be sent to it.
    """

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue(WAITING)
        self.dropped = asyncio.Event()
        """Set when the browser is disconnected, because it reads too slowly."""

    def offer(self, message: bytes) -> None:
        """
        Add a message for the browser. If too many messages wait already, mark the browser as one to
        be disconnected.
        """
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self.dropped.set()

    async def next(self) -> bytes:
        """
        Return the next message for the browser.
        """
        return await self._messages.get()


class Feed:
    """
    Draws the views of a job, and sends what has changed to all browsers.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._clients: set[Client] = set()

    @property
    def clients(self) -> int:
        """
        The number of connected browsers.
        """
        return len(self._clients)

    @property
    def full(self) -> bool:
        """
        True if no further browser may connect.
        """
        return len(self._clients) >= MOST

    def show(self, view: View) -> None:
        """
        Draw a view, and tell the browsers what has changed.
        """
        message: Message = self._page.update(view)
        if not message or not self._clients:
            return
        text = encoded(message)
        for client in self._clients:
            client.offer(text)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """
        Add a browser for the time of a `with` block, and yield its `Client`. Its messages are first
        the whole page, and then each change.
        """
        client = Client()
        client.offer(encoded(self._page.whole()))
        self._clients.add(client)
        try:
            yield client
        finally:
            self._clients.discard(client)
