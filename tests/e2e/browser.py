"""
Debian's Chromium without a window, spoken to with the DevTools protocol.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

Reply = dict[str, Any]  # Any: JSON of the DevTools protocol


def chromium() -> str:
    """
    Return the path of Chromium. Skip the test if it is not installed.
    """
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: it is in Debian's package chromium")
    return found


class Tab:
    """
    A page of the browser.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self.problems: list[str] = []
        """What the page or the browser has complained about: errors of scripts, and of the content
        security policy."""

    async def listen(self) -> None:
        """
        Take the messages of the browser, until its connection ends.
        """
        while True:
            try:
                message: Reply = json.loads(await self._socket.recv())
            except ConnectionClosed:
                return
            if "id" in message:
                self._replies.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error":
                    self.problems.append(f"{entry['text']} ({entry.get('url', '')})")

    async def call(self, method: str, **parameters: object) -> Reply:
        """
        Call a method of the protocol, and return its result.
        """
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        message = await asyncio.wait_for(reply, 30)
        assert "error" not in message, message
        result: Reply = message["result"]
        return result

    async def open(
        self, url: str, *, width: int = 1280, dark: bool = False, still: bool = False
    ) -> None:
        """
        Open a page in a window of some width, light or dark, with or without motion.
        """
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
            ],
        )
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && !!window.tft")

    async def value(self, expression: str) -> Any:  # Any: JSON
        """
        Return the value of an expression of JavaScript, or what its promise resolves to.
        """
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, limit: float = 20.0) -> None:
        """
        Wait until an expression of JavaScript is true, at most `limit` seconds.
        """
        async with asyncio.timeout(limit):
            while not await self.value(f"!!({expression})"):  # noqa: ASYNC110 # no event tells it
                await asyncio.sleep(0.02)

    async def press(self, key: str) -> None:
        """
        Press a key, such as `Tab`.
        """
        codes = {"Tab": 9, "Enter": 13, "ArrowUp": 38}
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
            )  # fmt: skip

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """
        Write a picture of the page as PNG or WebP: of all of it, or of what the window shows.
        """
        kind = path.suffix.removeprefix(".")
        how = {"quality": 50} if kind == "webp" else {}
        result = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=whole, format=kind, **how
        )
        await asyncio.to_thread(path.write_bytes, base64.b64decode(result["data"]))


def _started(log: Path, profile: Path) -> "subprocess.Popen[bytes]":
    with log.open("w") as err:
        return subprocess.Popen(
            [
                chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--remote-debugging-port=0",
                f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=err, start_new_session=True,
        )  # fmt: skip


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Tab]:
    """
    Start Chromium with its files in a directory, and yield a page of it.
    """
    log = directory / "chromium.log"
    process = _started(log, directory / "profile")
    try:
        async with asyncio.timeout(60):
            port = directory / "profile" / "DevToolsActivePort"
            while not (port.exists() and port.read_text().count("\n") >= 1):
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        number, path = port.read_text().splitlines()
        async with connect(f"ws://127.0.0.1:{number}{path}", max_size=None) as root:
            target = Tab(root)
            hearing = asyncio.create_task(target.listen())
            made = await target.call("Target.createTarget", url="about:blank")
            hearing.cancel()
        where = f"ws://127.0.0.1:{number}/devtools/page/{made['targetId']}"
        async with connect(where, max_size=None) as socket:
            tab = Tab(socket)
            hearing = asyncio.create_task(tab.listen())
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            yield tab
            hearing.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
