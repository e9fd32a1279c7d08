"""
`tft dashboard`: serves one page about a job, until the user ends the command.
"""

import asyncio
from pathlib import Path

import click

from tft.addresses import read_address
from tft.cli.parts import run_dir_option, until_left
from tft.dashboard.access import EXAMPLE, LOOPBACK, Access
from tft.errors import UsageError
from tft.launcher.exit_codes import COMPLETED
from tft.launcher.records import read_records
from tft.launcher.run import say


def dashboard_command() -> click.Command:
    """
    Return the command `tft dashboard`.
    """

    def dashboard(run_dir: Path, listen: str) -> int:
        return until_left(_dashboard(run_dir, listen))

    return click.Command(
        "dashboard",
        callback=dashboard,
        params=[
            run_dir_option(),
            click.Option(
                ["--listen"],
                metavar="ADDRESS:PORT",
                default=LOOPBACK,
                show_default=True,
                help="Where to serve the page; port 0: a free port. At an address that other "
                "machines reach, the page needs a token, which is printed.",
            ),
        ],
        help="Serve a live page about a job to browsers. Ctrl-C leaves; the job goes on.",
    )


async def _dashboard(run_dir: Path, listen: str) -> int:
    address = read_address(listen, "--listen", EXAMPLE)
    _check_installed()
    # import these modules only here, because they need packages that are optional
    from tft.dashboard.feed import Feed
    from tft.dashboard.following import JobFollower
    from tft.dashboard.page import Page
    from tft.dashboard.server import serving

    await asyncio.to_thread(read_records, run_dir)  # check that this is a run directory
    page, access = Page(), Access(address)
    feed = Feed(page)
    async with serving(address, access, page, feed) as url:
        click.echo(url)
        if access.token:
            say(
                "who has this address with its token can see the page; it is not encrypted on its "
                "way (docs/explanation/security.md)"
            )
        say("Ctrl-C leaves; the job goes on")
        await JobFollower(run_dir, feed.show).follow()
    return COMPLETED


def _check_installed() -> None:
    try:
        import aiohttp
        import jinja2
    except ImportError:
        raise UsageError(
            "`tft dashboard` needs the packages aiohttp and jinja2: pip install "
            "'tft-bus[dashboard]'; `tft top` shows a job in the terminal without them"
        ) from None
    del aiohttp, jinja2
