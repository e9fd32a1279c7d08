"""
A recovery plugin that advises what to do about a lost rank.

    tft run --loss-limit 3 ...       when a rank loses its process for the third time, end the job
                                     with a last checkpoint, because its node may be faulty
    tft run --await-spare 60 ...     when a node is lost and no other node has room for its ranks,
                                     wait up to 60 s for a spare node

If no command line starts the controller, set the variables TFT_LOSS_LIMIT and TFT_AWAIT_SPARE
instead.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import click

from tft.spi import Advice, IncidentView, hookimpl

LIMIT = "TFT_LOSS_LIMIT"
SPARE = "TFT_AWAIT_SPARE"
ASK_AGAIN = 1.0
"""Seconds after which the plugin looks again whether a spare node has come."""


class LossLimit:
    """
    The hooks of the plugin. tft calls them on one thread at a time.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._lost: dict[int, frozenset[int]] = {}
        """By incident: the ranks that have lost their process in it."""
        self._waited: Counter[int] = Counter()
        """By incident: how often a spare node was awaited for `ASK_AGAIN` seconds."""

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        """
        Return the options of the plugin.
        """
        return [
            click.Option(
                ["--loss-limit"],
                type=click.IntRange(min=1),
                metavar="N",
                help="The Nth time that one rank loses its process, end with a last checkpoint.",
            ),
            click.Option(
                ["--await-spare"],
                type=click.FloatRange(min=0.0),
                metavar="SECONDS",
                help="Where no node has room for the ranks of a lost one, wait for a spare node.",
            ),
        ]

    @hookimpl
    def tft_environment(
        self,
        options: Mapping[str, Any],  # Any: each option's own type
    ) -> Mapping[str, str]:
        """
        Pass the options on to the controller.
        """
        told = {LIMIT: options["loss_limit"], SPARE: options["await_spare"]}
        return {name: str(value) for name, value in told.items() if value is not None}

    @hookimpl
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Return the advice for an incident. None: tft decides as without this plugin.

        tft asks again in the same incident, after a wait or when another fault has joined it. So
        the notes about an incident replace the earlier notes about the same incident.
        """
        lost = frozenset(
            f.rank for f in incident.faults if f.rank is not None and f.kind == "process"
        )
        self._lost[incident.number] = lost
        possible = {offer.strategy for offer in incident.offers if offer.why_not is None}
        return self._end(lost, possible) or self._wait(incident, possible)

    def _end(self, lost: frozenset[int], possible: set[str]) -> Advice | None:
        limit = int(self._environment.get(LIMIT, "0"))
        times = Counter(chain.from_iterable(self._lost.values()))
        over = sorted(rank for rank in lost if times[rank] >= limit)
        if not limit or not over or "dump" not in possible:
            return None
        why = f"rank {over[0]} has lost its process {times[over[0]]} times; the limit is {limit}"
        return Advice(strategy="dump", why=why)

    def _wait(self, incident: IncidentView, possible: set[str]) -> Advice | None:
        limit = float(self._environment.get(SPARE, "0"))
        nodes = [fault.evidence for fault in incident.faults if fault.kind == "node"]
        waited = self._waited[incident.number] * ASK_AGAIN
        if not nodes or "recover" in possible or waited >= limit:
            return None
        self._waited[incident.number] += 1
        return Advice(wait=ASK_AGAIN, why=f"a spare node is awaited: {nodes[0]}")


plugin = LossLimit()
"""What the entry point names."""
