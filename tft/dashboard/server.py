"""
Serves the page by HTTP. All requests are GET: nothing that a browser sends changes anything.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tft.addresses import ListenAddress
from tft.dashboard.access import Access
from tft.dashboard.feed import Client, Feed
from tft.dashboard.page import Page
from tft.errors import UsageError

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware
    from aiohttp.web import Application, Request, StreamResponse

STATIC = Path(__file__).parent / "static"
_KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
_QUIET = 10.0
"""Seconds without a message after which an empty message is sent, so that both ends notice a broken
connection."""
_BUFFER = 64 * 1024
"""The size in bytes of the kernel's buffer for one browser. Without this limit, the kernel would
keep megabytes for a browser that does not read."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@asynccontextmanager
async def serving(
    address: ListenAddress, access: Access, page: Page, feed: Feed
) -> AsyncIterator[str]:
    """
    Serve the page while the context is open, and yield its URL. Raises `UsageError` if nothing can
    be served at the address.
    """
    from aiohttp.web import AppRunner, SockSite

    listener = _listener(address)
    port = int(listener.getsockname()[1])
    runner = AppRunner(
        _application(access, page, feed, port), access_log=None, shutdown_timeout=0.5
    )
    await runner.setup()
    try:
        await SockSite(runner, listener).start()
        served = replace(address, port=port).target
        yield f"http://{served}/{f'?token={access.token}' if access.token else ''}"
    finally:
        await runner.cleanup()


def _listener(address: ListenAddress) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted connections inherit this size of the buffer
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        listener.bind((address.host, address.port))
    except OSError as refused:
        listener.close()
        raise UsageError(
            f"--listen {address.target}: the page cannot be served there: {refused.strerror or refused}. Choose an address of this machine and "
            "a free port, or port 0"
        ) from None
    return listener


def _application(access: Access, page: Page, feed: Feed, port: int) -> "Application":
    from aiohttp import web

    async def document(request: "Request") -> "StreamResponse":
        return web.Response(text=page.document(), content_type="text/html")

    async def events(request: "Request") -> "StreamResponse":
        if feed.full:
            raise web.HTTPServiceUnavailable(text="tft: too many browsers watch this page\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with feed.client() as client:
            sending = asyncio.create_task(_send(client, response))
            dropped = asyncio.create_task(client.dropped.wait())
            try:
                await asyncio.wait([sending, dropped], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, dropped):
                    task.cancel()
                await asyncio.wait([sending, dropped])
            if request.transport is not None:
                # do not wait until a browser that does not read has received the remaining messages
                request.transport.abort()
        return response

    async def rank(request: "Request") -> "StreamResponse":
        number = request.query.get("rank", "")
        if not number.isdecimal() or len(number) > 9:
            raise web.HTTPBadRequest(text="tft: expected is /rank?rank=NUMBER\n")
        return web.Response(text=page.rank(int(number)), content_type="text/html")

    async def static(request: "Request") -> "StreamResponse":
        path = STATIC / request.match_info["name"]
        kind = _KINDS.get(path.suffix)
        if kind is None or not path.is_file():
            raise web.HTTPNotFound(text="tft: there is no such file\n")
        return web.Response(body=path.read_bytes(), content_type=kind, charset="utf-8")

    async def headed(request: "Request", response: "StreamResponse") -> None:
        response.headers.update(_HEADERS)
        response.headers["Server"] = "tft"

    application = web.Application(middlewares=[_guard(access, port)])
    application.on_response_prepare.append(headed)
    for path, handler in (
        ("/", document),
        ("/events", events),
        ("/rank", rank),
        (r"/static/{name:[A-Za-z0-9.]+}", static),
    ):
        application.router.add_get(path, handler, allow_head=False)
    return application


def _guard(access: Access, port: int) -> "Middleware":
    """
    Return a function through which every request passes. The function refuses requests that may not
    see the page.
    """
    from aiohttp import web

    cookie = f"tft_token_{port}"  # name the port, because a browser sends cookies to all ports

    @web.middleware
    async def guard(request: "Request", handler: "Handler") -> "StreamResponse":
        if not access.names(request.host):
            raise web.HTTPForbidden(
                text="tft: the address of the page has a host name that is not of this machine\n"
            )
        brought = request.query.get("token", "")
        if not access.admits([brought, request.cookies.get(cookie, "")]):
            raise web.HTTPUnauthorized(
                text="tft: the page needs the token: open the address that `tft dashboard` printed\n"
            )
        if brought and access.token and request.path == "/":
            # redirect to an address without the token, so that the browser's history does not keep
            # it
            answer = web.HTTPSeeOther("/")
            if access.admits([brought]):
                # `Lax` and not `Strict`: with `Strict`, a link in a chat would not work, because
                # the browser would not send the cookie after the redirection
                answer.set_cookie(cookie, brought, httponly=True, samesite="Lax", path="/")
            raise answer
        return await handler(request)

    return guard


async def _send(client: Client, response: "StreamResponse") -> None:
    """
    Send the messages of a client until its connection ends.
    """
    with suppress(ConnectionError):
        while True:
            try:
                async with asyncio.timeout(_QUIET):
                    message = await client.next()
            except TimeoutError:
                message = b": \n\n"
            await response.write(message)
