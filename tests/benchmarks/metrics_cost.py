"""
What `tft run --metrics` costs the controller of a job of 10,000 ranks: a heartbeat, its preparation
for plugins, and a scrape.

    python -m tests.benchmarks.metrics_cost
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pluggy
from prometheus_client import CollectorRegistry, generate_latest
from tft_prometheus.address import Address
from tft_prometheus.exporter import Exporter
from tft_prometheus.families import JobCollector

from tft.controller.advisors import Advisors
from tft.plugins import add
from tft.protocol.messages import Beat, Position, Pulse
from tft.spi import RankBeat, hookimpl
from tft.spi.plugin import PluginSpecs

NODES, EACH = 1250, 8
"""Nodes, and ranks of each node."""
STEPS = 20


class Idle:
    """
    A plugin that does nothing with a heartbeat.
    """

    @hookimpl
    def tft_on_beat(self, node: int) -> None:
        return None


def seconds(act: Callable[[], object]) -> float:
    """
    Return how long a call takes: the median of several.
    """
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return median(taken)


def exporter() -> Exporter:
    """
    Return the exporter of a job that trains.
    """
    made = Exporter(Address(host="127.0.0.1", port=0), Path("unused"), "/runs/a")
    made.event("leads", {"ranks": NODES * EACH, "state": "healthy", "incident": 0})
    return made


def beats(step: int) -> list[tuple[RankBeat, ...]]:
    """
    Return the heartbeats of all nodes, whose ranks have completed `step`.
    """
    return [
        tuple(
            RankBeat(
                rank=node * EACH + i, incarnation=0, step=step, training=True, moved=step + i / 100
            )
            for i in range(EACH)
        )
        for node in range(NODES)
    ]  # fmt: skip


def heard() -> float:
    """
    Return the microseconds that the plugin needs for a heartbeat.
    """
    sent = [beats(step) for step in range(STEPS)]
    job = exporter()

    def all_beats() -> None:
        for each in sent:
            for node, ranks in enumerate(each):
                job.beat(node, ranks)

    return seconds(all_beats) / STEPS / NODES * 1e6


def prepared() -> float:
    """
    Return the microseconds that the controller needs to prepare a heartbeat for plugins.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(PluginSpecs)
    add(manager, Idle(), "idle")
    advisors = Advisors(manager)
    where = Position(step=9, window=False)
    sent = [
        Beat(
            node=node,
            at=5.0,
            pulses=tuple(
                Pulse(
                    rank=node * EACH + i, incarnation=0, position=where, training=True, moved=4.0
                )
                for i in range(EACH)
            ),
        )
        for node in range(NODES)
    ]  # fmt: skip

    def all_beats() -> None:
        for each in sent:
            advisors.beat(each)

    return seconds(all_beats) / NODES * 1e6


def main() -> None:
    """
    Measure, and print a line of JSON.
    """
    job = exporter()
    for node, ranks in enumerate(beats(1)):
        job.beat(node, ranks)
    registry = CollectorRegistry()
    registry.register(JobCollector(job.read))
    found = {
        "ranks": NODES * EACH,
        "beat_us": heard(),
        "preparation_us": prepared(),
        "read_ms": seconds(job.read) * 1e3,
        "scrape_ms": seconds(lambda: generate_latest(registry)) * 1e3,
        "bytes": len(generate_latest(registry)),
    }
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
