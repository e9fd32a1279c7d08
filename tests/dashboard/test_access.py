"""
Who may see the page, on real sockets.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

import aiohttp

from tft.addresses import ListenAddress, read_address
from tft.dashboard.access import EXAMPLE, Access
from tft.dashboard.feed import Feed
from tft.dashboard.page import Page
from tft.dashboard.server import serving
from tft.dashboard.view import View
from tft.errors import UsageError


def address_of(text: str) -> ListenAddress:
    """
    Return the address that the option `--listen` names.
    """
    return read_address(text, "--listen", EXAMPLE)


def shown() -> tuple[Page, Feed]:
    """
    Return a page with a small view.
    """
    page = Page()
    feed = Feed(page)
    feed.show(View(name="run", mood="healthy", title="healthy"))
    return page, feed


@pytest.mark.parametrize("text", ["8080", "127.0.0.1", ":80", "127.0.0.1:x", "127.0.0.1:65536"])
def test_address_that_is_none_is_refused(text: str) -> None:
    """When `--listen` is given no address, then it is refused with an example."""
    with pytest.raises(UsageError, match=r"expected is ADDRESS:PORT, such as 127\.0\.0\.1:8080"):
        address_of(text)


def test_only_addresses_of_this_machine_need_no_token() -> None:
    """When other machines can reach the address, then a token is made, another one each time."""
    assert [Access(address_of(f"{host}:0")).token for host in ("127.0.0.1", "[::1]")] == ["", ""]
    tokens = {Access(address_of("0.0.0.0:0")).token for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(token) >= 40 for token in tokens)


def test_name_of_another_site_is_refused_without_a_token() -> None:
    """When there is no token, then only the names of this machine are answered."""
    access = Access(address_of("127.0.0.1:0"))
    told = {
        name: access.names(name)
        for name in (
            "localhost:80",
            "127.0.0.1",
            "[::1]:80",
            "evil.example",
            "127.0.0.1.evil:1",
            "",
        )
    }
    assert list(told.values()) == [True, True, True, False, False, False]


async def test_page_at_an_open_address_needs_the_token() -> None:
    """When other machines can reach the page, then nothing of it is served without the token. The
    token is taken from the address once, and from a cookie after that."""
    address = ListenAddress(host="0.0.0.0", port=0)
    access = Access(address)
    page, feed = shown()
    async with serving(address, access, page, feed) as url:
        base = url.partition("?")[0].replace("0.0.0.0", "127.0.0.1")
        jar = aiohttp.CookieJar(unsafe=True)  # takes cookies of addresses too
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            for path in ("", "events", "rank?rank=0", "static/page.js", "?token=x", "?token=%ff"):
                async with session.get(f"{base}{path}") as answer:
                    assert answer.status == 401, path
                    text = await answer.text()
                assert "needs the token" in text
                assert access.token not in text
            async with session.get(f"{base}?token={access.token}", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (303, "/")
                cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Lax" in cookie
            async with session.get(base) as answer:
                assert "healthy" in await answer.text()


async def test_address_that_is_taken_is_refused() -> None:
    """When another process listens at the port, then the command is refused, and says what to do."""
    page, feed = shown()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(UsageError, match="cannot be served there: Address already in use"):
            async with serving(address, Access(address), page, feed):
                pass


async def test_browser_that_does_not_read_is_dropped() -> None:
    """When a browser takes no messages, then only a few wait for it, and its connection ends. The
    others get all messages."""
    address = ListenAddress(host="127.0.0.1", port=0)
    page, feed = shown()
    async with serving(address, Access(address), page, feed) as url:
        port = int(url.rpartition(":")[2].strip("/"))
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", port))
        lazy.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with lazy:
            async with (
                aiohttp.ClientSession(read_bufsize=2**22) as session,
                session.get(f"{url}events") as answer,
            ):
                await until(lambda: feed.clients == 2)
                for number in range(200):
                    title = f"{number} {'x' * 20_000}"
                    feed.show(View(name="run", mood="busy", title=title))
                    line = b""
                    while f">{number} x".encode() not in line:
                        line = await answer.content.readline()
                await until(lambda: feed.clients == 1)


async def until(fact: Callable[[], bool]) -> None:
    """
    Wait until a function returns true.
    """
    async with asyncio.timeout(10):
        while not fact():  # noqa: ASYNC110 # no event tells of the end of a connection
            await asyncio.sleep(0.01)


async def test_browsers_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When very many browsers watch, then one more is told so."""
    monkeypatch.setattr("tft.dashboard.feed.MOST", 1)
    address = ListenAddress(host="127.0.0.1", port=0)
    page, feed = shown()
    async with (
        serving(address, Access(address), page, feed) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}events") as first,
    ):
        await first.content.readline()
        async with session.get(f"{url}events") as second:
            assert second.status == 503


def test_library_in_the_package_is_the_one_that_is_named() -> None:
    """When the package has uPlot, then its licence is beside it, and the version is the one that the
    page on the dashboard names."""
    static = Path(__file__).parents[2] / "tft" / "dashboard" / "static"
    assert "(v1.6.32)" in (static / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT License" in (static / "uPlot.LICENSE").read_text()
    page = (Path(__file__).parents[2] / "docs" / "howto" / "dashboard.md").read_text()
    assert "uPlot 1.6.32" in page
