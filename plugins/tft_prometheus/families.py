"""
The metrics with their names, as Prometheus reads them. The names follow the rules of Prometheus:
times are in seconds, and the name of a counter, which only grows, ends in `_total`.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tft_prometheus.histogram import Counted
from tft_prometheus.job import RESULTS, STATES, Reading


class JobCollector(Collector):
    """
    Gives the registry of `prometheus_client` the present numbers of a job. `read` is a function
    that returns these numbers.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """
        Yield all metrics.
        """
        now = self._read()
        yield from _of_the_job(now)
        yield from _of_training(now)
        yield from _of_incidents(now)


def _of_the_job(now: Reading) -> Iterator[Metric]:
    # Prometheus itself adds the labels `job`, `instance` and `run_dir` to each metric, so the
    # labels here must have other names
    names = {"run_dir": "directory", "job": "job_name", "run": "run"}
    info = {label: now.info.get(name, "") for name, label in names.items()}
    yield InfoMetricFamily("tft_job", "The names of the job.", value=info)
    yield GaugeMetricFamily("tft_job_ranks", "Ranks with which the job was started.", now.ranks)
    yield _one_hot("tft_job_state", "The state of the job is 1, others are 0.", STATES, now.state)
    yield _one_hot(
        "tft_job_ended", "1 for the result of a job that has ended.", RESULTS, now.result, "result"
    )
    yield GaugeMetricFamily(
        "tft_job_healthy", "1 if /healthz answers 200, and 0 if it answers 503.", float(now.healthy)
    )
    events = CounterMetricFamily(
        "tft_events_total", "Entries of the controller's log, by name.", labels=["event"]
    )
    for event, times in sorted(now.events.items()):
        events.add_metric([event], times)
    yield events


def _of_training(now: Reading) -> Iterator[Metric]:
    counts = now.counts
    yield GaugeMetricFamily("tft_nodes", "Nodes that send heartbeats.", counts.nodes)
    yield GaugeMetricFamily("tft_ranks", "Ranks in these heartbeats.", counts.ranks)
    yield GaugeMetricFamily(
        "tft_ranks_training", "Ranks that are in their training loop.", counts.training
    )
    if counts.lowest is not None and counts.highest is not None:
        yield GaugeMetricFamily(
            "tft_step_lowest",
            "The last step that all training ranks have completed.",
            counts.lowest,
        )
        yield GaugeMetricFamily(
            "tft_step_highest", "The last step that some rank has completed.", counts.highest
        )
    yield _histogram(
        "tft_step_duration_seconds", "The time of a step, without incidents.", now.steps
    )
    yield GaugeMetricFamily(
        "tft_progress_age_seconds", "Seconds since any rank made progress.", now.stillness
    )
    yield GaugeMetricFamily("tft_ranks_slow", "Ranks that a plugin finds slow now.", now.slow)
    slow = GaugeMetricFamily(
        "tft_rank_slowness_seconds",
        "By how much a slow rank needs longer for its own work in a step; the slowest ranks only.",
        labels=["rank", "cause"],
    )
    for each in now.slowest:
        slow.add_metric([str(each.rank), each.cause], each.seconds)
    yield slow


def _of_incidents(now: Reading) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "tft_incident_open", "1 while an incident is open.", float(now.incident_open)
    )
    yield GaugeMetricFamily(
        "tft_incident_age_seconds", "Seconds since the open incident began; 0 without.",
        now.incident_age,
    )  # fmt: skip
    yield _histogram(
        "tft_incident_duration_seconds", "The duration of incidents that are over.", now.durations
    )
    yield _counter("tft_incidents_total", "Incidents that are over.", "strategy", now.incidents)
    yield _counter("tft_faults_total", "Faults that were noticed.", "kind", now.faults)
    for name, text, value in (
        ("tft_steps_lost_total", "Completed steps that were computed again.", now.steps_lost),
        (
            "tft_processes_started_total",
            "Processes that incidents have started, mostly in place of lost ones.",
            now.processes_started,
        ),
        ("tft_updates_refused_total", "Refused updates, each attempt.", now.updates_refused),
        (
            "tft_checkpoints_missed_total",
            "Periodic checkpoints that could not be written.",
            now.checkpoints_missed,
        ),
    ):
        yield CounterMetricFamily(name, text, value)


def _one_hot(
    name: str, text: str, values: tuple[str, ...], present: str, label: str = "state"
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value in values:
        family.add_metric([value], float(value == present))
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, times in values.items():
        family.add_metric([value], times)
    return family


def _histogram(name: str, text: str, counted: Counted) -> Metric:
    buckets, total = counted
    return HistogramMetricFamily(name, text, buckets=list(buckets), sum_value=total)
