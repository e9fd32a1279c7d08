"""
The page of real jobs: what `tft dashboard` serves, and how it follows kills, restarts and the end.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import ROOT, Job, job, left_behind, reached, strike, until

LONG = ("100000", "--seconds", "0.02")
"""The arguments of a job that does not end by itself."""


@contextmanager
def dashboard(run_dir: Path, *options: str) -> Iterator[str]:
    """
    Start `tft dashboard`, and yield the address that it prints.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tft", "dashboard", "--run-dir", str(run_dir), *options],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), url
        yield url
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert process.returncode == 143


class Browser:
    """
    What a browser knows of a page: the texts, and the letters of the ranks.
    """

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.sections: dict[str, str] = {}
        self.codes: list[str] = []
        self.points: list[Any] = []  # Any: JSON
        self.at = 0.0
        """The time at which the last message has arrived (CLOCK_MONOTONIC)."""
        self._answer = answer

    async def until(self, fact: Callable[[], bool], what: str, limit: float = 20.0) -> None:
        """
        Take messages until `fact` is true.
        """
        try:
            async with asyncio.timeout(limit):
                while not fact():
                    line = await self._answer.content.readline()
                    assert line, "the stream has ended"
                    if line.startswith(b"data: "):
                        self.at = time.monotonic()
                        self._take(json.loads(line[6:]))
        except TimeoutError:
            raise AssertionError(f"{what} did not come true: {self.sections}") from None

    def _take(self, message: dict[str, Any]) -> None:  # Any: JSON
        self.sections |= message.get("sections", {})
        if "codes" in message:
            self.codes = list(message["codes"])
        for rank, letter in message.get("ranks", ()):
            self.codes[rank] = letter
        self.points = message.get("points", self.points) + message.get("more", [])

    def step(self) -> int | None:
        """
        Return the step of the slowest rank. None: it is not known.
        """
        found = re.search(r"<dt>Step</dt><dd>(\d+)", self.sections.get("numbers", ""))
        return int(found[1]) if found else None

    def says(self, section: str, text: str) -> Callable[[], bool]:
        """
        Return a function that tells whether a part of the page has a text.
        """
        return lambda: text in self.sections.get(section, "")


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Browser]:
    """
    Open the stream of a page.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with (
        # a line has a whole page, and the client refuses lines longer than its buffer
        aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session,
        session.get(f"{url}events") as answer,
    ):
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield Browser(answer)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, str]]:
    """
    Return a job with three ranks in a directory with an odd name, and the address of its page.
    """
    run_dir = tmp_path_factory.mktemp("page") / "<b>run&"
    with job(run_dir, "--adaptor", "fake", script=FAKE, arguments=LONG, nproc=3) as started:
        until(reached(started, 5), "step 5")
        with dashboard(run_dir) as url:
            yield started, url


def opened_at(run_dir: Path, kind: str) -> float:
    """
    Return when the controller has recorded the last event of a kind (CLOCK_MONOTONIC).
    """
    lines = [json.loads(line) for line in (run_dir / "story.jsonl").read_text().splitlines()]
    return next(float(line["at"]) for line in reversed(lines) if line["kind"] == kind)


async def test_page_is_served_to_this_machine_alone(running: tuple[Job, str]) -> None:
    """When a browser asks for the page, then it gets the job with all texts escaped, and headers
    that allow nothing from outside. Other methods, names and files are refused."""
    _, url = running
    async with watching(url) as browser:
        await browser.until(lambda: browser.codes == ["t"] * 3, "all ranks train")
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            text, headers = await answer.text(), answer.headers
        assert "&lt;b&gt;run&amp;" in text
        assert "<b>run" not in text
        assert "healthy" in text
        assert headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "unsafe" not in headers["Content-Security-Policy"]
        for path, host, status in (
            ("", "evil.example:80", 403), ("", "localhost:1", 200), ("rank?rank=1", "", 200),
            ("rank?rank=x", "", 400), ("static/page.js", "", 200), ("static/page.py", "", 404),
            ("static/../server.py", "", 404), ("static/%2e%2e%2fserver.py", "", 404),
        ):  # fmt: skip
            named = {"Host": host} if host else {}
            async with session.get(f"{url}{path}", headers=named) as answer:
                assert answer.status == status, path
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            async with session.request(method, url) as answer:
                assert answer.status == 405


async def test_events_follow_a_kill(running: tuple[Job, str]) -> None:
    """When a rank is killed, then the open incident is on the page at once with its phases, and
    after it the sentence about it. Browsers that come later get the same."""
    started, url = running
    async with AsyncExitStack() as stack:
        browsers = [await stack.enter_async_context(watching(url)) for _ in range(20)]
        browser = browsers[0]
        await browser.until(browser.says("head", "healthy"), "the job is healthy")
        strike(started, "rank-1")
        await browser.until(browser.says("incident", "Incident 1"), "the incident is open")
        late = browser.at - opened_at(started.run_dir, "Exited")
        assert re.search(r"Rank 1 \(pid \d+ on [\d.]+\) was killed", browser.sections["incident"])
        assert 'aria-current="step"' in browser.sections["incident"]
        assert 0 < late < 1.0  # the soak test of the browser demands 0.2 s of a machine with room
        for each in browsers:
            await each.until(each.says("past", "replaced in"), "it is over")
            await each.until(lambda each=each: each.codes == ["t"] * 3, "all ranks train")  # type: ignore[misc] # a loop variable kept
        assert browser.sections["incident"] == ""
    async with watching(url) as later:
        await later.until(later.says("past", "was killed by SIGKILL in step"), "it is known")
        assert later.points


async def test_page_outlives_broker_and_controller(running: tuple[Job, str]) -> None:
    """When the controller and the broker are killed, then the page follows the next ones."""
    started, url = running
    async with watching(url) as browser:
        await browser.until(browser.says("parts", "(epoch 1)"), "the controller answers")
        strike(started, "controller")
        await browser.until(browser.says("parts", "(epoch 2)"), "the next controller answers")
        before = started.pid("broker")
        strike(started, "broker")
        await browser.until(lambda: started.pid("broker") != before, "there is another broker")
        step = browser.step() or 0
        await browser.until(lambda: (browser.step() or 0) > step + 50, "steps are heard")
        await browser.until(browser.says("head", "healthy"), "the job is healthy")


async def test_page_shows_the_end_and_a_directory_that_comes_back(
    running: tuple[Job, str],
) -> None:
    """When the job ends, then the page says how, and what to do. When its directory disappears, then
    the page says so and waits for it."""
    started, url = running
    run_dir = started.run_dir
    away = run_dir.with_name("away")
    async with watching(url) as browser:
        await browser.until(browser.says("head", "healthy"), "the job is healthy")
        started.process.send_signal(signal.SIGTERM)
        await browser.until(browser.says("head", "The job was cancelled by a signal"), "its end")
        assert "again with <code>--run-dir</code>" in browser.sections["incident"]
        assert "No rank" not in browser.sections["ranks"]
        started.end()
        run_dir.rename(away)
        await browser.until(browser.says("head", "there is no such directory"), "it is gone")
        away.rename(run_dir)
        await browser.until(browser.says("head", "cancelled by a signal"), "it is back")


@pytest.mark.soak
async def test_page_follows_the_next_run_in_the_directory(tmp_path: Path) -> None:
    """When a job is continued with `--resume`, then the page follows the next run, keeps the
    incidents of the one before, and names the new ones. When all is killed, then it says so."""
    run_dir = tmp_path / "run"
    own = ("--adaptor", "fake", "--checkpoint-every", "50")
    async with AsyncExitStack() as stack:
        with job(run_dir, *own, script=FAKE, arguments=LONG, nproc=2) as first:
            until(reached(first, 60), "step 60")
            url = stack.enter_context(dashboard(run_dir))
            browser = await stack.enter_async_context(watching(url))
            await browser.until(browser.says("head", "healthy"), "the first run is healthy")
            first.process.send_signal(signal.SIGTERM)
            await browser.until(browser.says("head", "cancelled"), "its end")
            first.end()
        with job(run_dir, *own, "--resume", script=FAKE, arguments=LONG, nproc=2) as second:
            await browser.until(browser.says("head", "healthy"), "the second run is healthy", 40)
            assert browser.sections["past"].count("<li>") == 1
            strike(second, "rank-0")
            await browser.until(browser.says("past", "Incident 2 of run 2"), "its incident")
            assert browser.sections["past"].count("<li>") == 2
            os.killpg(second.process.pid, signal.SIGKILL)
            for pid in left_behind(run_dir):
                os.kill(pid, signal.SIGKILL)
            await browser.until(browser.says("head", "ended without a report"), "the end", 30)


@pytest.mark.soak
async def test_slow_rank_is_on_the_page(tmp_path: Path) -> None:
    """When the controller names a slow rank, then the page has the sentence and marks the rank."""
    run_dir = tmp_path / "run"
    script = ROOT / "tests" / "e2e" / "slow_job.py"
    arguments = ("1", "backward", "100", "30", "100000", "0.03")
    with job(run_dir, nproc=3, script=script, arguments=arguments):
        until((run_dir / "story.jsonl").exists, "the job has begun", 60)
        with dashboard(run_dir) as url:
            async with watching(url) as browser:
                await browser.until(
                    browser.says("slow", "rank 1 is slow since step"), "its name", 60
                )
                await browser.until(lambda: browser.codes[1] == "s", "its mark")
                assert "its compute takes" in browser.sections["slow"]
