"""
The metrics of a job: what events and heartbeats mean, the address, and the server. No job runs.
"""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
import tft_prometheus
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tft_prometheus import Plugin, ServingPlugin
from tft_prometheus.address import FILE, Address
from tft_prometheus.families import JobCollector
from tft_prometheus.incidents import MOST_NAMES, STRATEGIES
from tft_prometheus.job import LOOP, MOST_EVENTS, MOST_SLOW, STATES, Health, JobMetrics
from tft_prometheus.positions import FIRST, FLOOR, LEARNT, SILENT
from tft_prometheus.server import AT_ONCE, MetricsServer, application, earlier_port, open_server

from tft.core.job.policy import STRATEGIES as TFT_STRATEGIES
from tft.core.job.transitions import State
from tft.errors import UsageError
from tft.spi import RankBeat

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "prometheus"
LEADS = {
    "nodes": [], "job": "j", "run": "r", "run_dir": "/d", "ranks": 4, "state": "awaiting",
    "incident": 0,
}  # fmt: skip


class Told:
    """
    A job that is told by events and heartbeats, with a clock that the test moves.
    """

    def __init__(self, state: str = "healthy") -> None:
        self.now = 1000.0
        self.metrics = JobMetrics(self.now)
        self.tell("leads", **{**LEADS, "state": state})

    def tell(self, event: str, **facts: object) -> None:
        """
        Tell an event of the controller.
        """
        self.metrics.event(event, facts, self.now)

    def beat(
        self, *steps: int | None, node: int = 0, moved: float | None = None, after: float = 0.0
    ) -> None:
        """
        Send a heartbeat of a node `after` so many seconds. Each rank of the node has completed a
        step, or does not train (None).
        """
        self.now += after
        self.metrics.turned(self.now)
        beats = [
            RankBeat(
                rank=10 * node + i, incarnation=0, step=step or 0, training=step is not None,
                moved=self.now if moved is None else moved,
            )
            for i, step in enumerate(steps)
        ]  # fmt: skip
        self.metrics.beat(node, beats, self.now)

    def value(self, name: str, **labels: str) -> float | None:
        """
        Return the value of a sample in the text that Prometheus would read.
        """
        registry = CollectorRegistry()
        registry.register(JobCollector(lambda: self.metrics.read(self.now)))
        text = generate_latest(registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None

    def health(self) -> Health:
        """
        Return whether the job is healthy now.
        """
        return self.metrics.health(self.now)


# ---------------------------------------------------------------- events


def test_known_names_are_those_of_the_job_machine() -> None:
    """When the job machine gets a state or a strategy, then the metrics must learn its name."""
    assert set(STATES) == {str(state) for state in State}
    assert set(STRATEGIES) == {*TFT_STRATEGIES, "start", "exit"}


def test_incident_is_open_from_its_fault_until_it_is_closed() -> None:
    """When a rank is lost and replaced, then the incident is open meanwhile, and afterwards it is
    counted with its strategy, its duration and its cost."""
    job = Told()
    assert job.value("tft_incidents_total", strategy="recover") == 0
    job.tell("fault", incident=1, kind="process", rank=2, step=7)
    job.tell("state", state="freezing", incident=1)
    job.now += 3
    assert job.value("tft_incident_open") == 1
    assert job.value("tft_incident_age_seconds") == 3
    assert job.value("tft_faults_total", kind="process") == 1
    assert job.value("tft_job_state", state="freezing") == 1
    assert job.value("tft_job_state", state="healthy") == 0
    job.tell("strategy_chosen", incident=1, strategy="recover", why="")
    job.tell(
        "incident_closed", incident=1, strategy="recover", step=7, seconds=4.0, steps_lost=2,
        processes_started=1,
    )  # fmt: skip
    job.tell("state", state="healthy", incident=1)
    assert job.value("tft_incident_open") == job.value("tft_incident_age_seconds") == 0
    assert job.value("tft_incidents_total", strategy="recover") == 1
    assert job.value("tft_incident_duration_seconds_sum") == 4
    assert job.value("tft_incident_duration_seconds_bucket", le="2.5") == 0
    assert job.value("tft_incident_duration_seconds_bucket", le="5.0") == 1
    assert job.value("tft_steps_lost_total") == 2
    assert job.value("tft_processes_started_total") == 1


def test_start_of_a_job_is_no_incident() -> None:
    """When a job starts, then it goes through the states of an incident, but no incident is
    open."""
    job = Told("awaiting")
    job.tell("strategy_chosen", incident=0, strategy="start", why="")
    job.tell("state", state="repairing", incident=0)
    assert job.value("tft_incident_open") == 0
    assert job.health().ok


@pytest.mark.parametrize(("state", "strategy"), [("dumping", "dump"), ("repairing", "exit")])
def test_incident_that_ends_the_job_is_counted(state: str, strategy: str) -> None:
    """When a job ends in an incident, then the incident counts as `dump` if the job was writing its
    last checkpoint, and as `exit` otherwise."""
    job = Told()
    job.tell("fault", incident=1, kind="hang", rank=2, step=7)
    job.tell("strategy_chosen", incident=1, strategy="dump", why="")
    job.tell("state", state=state, incident=1)
    job.now += 2
    job.tell("job_ends", result="dumped", code=3, why="")
    assert job.value("tft_incidents_total", strategy=strategy) == 1
    assert job.value("tft_incident_duration_seconds_sum") == 2
    assert job.value("tft_job_ended", result="dumped") == 1
    assert job.value("tft_job_ended", result="completed") == 0


def test_new_controller_shows_the_incident_that_it_finds() -> None:
    """When a controller is started again in the middle of an incident, then the incident is open;
    the counters begin at 0."""
    job = Told()
    job.tell("leads", **{**LEADS, "state": "repairing", "incident": 3})
    assert job.value("tft_incident_open") == 1
    assert job.health().why == "incident 3 is being handled for 0 s: repairing"


def test_refused_updates_and_missed_checkpoints_are_counted_once_each() -> None:
    """When all ranks refuse the same update, then one refusal is counted, and a numeric fault of a
    rank is none. Each missed checkpoint is counted once."""
    job = Told()
    for rank in range(4):
        job.tell("update_refused", rank=rank, step=5, why="the loss is nan")
        if rank == 0:
            job.tell("fault", incident=1, kind="numeric", rank=None, step=5)
    job.tell("fault", incident=1, kind="numeric", rank=2, step=5)
    job.tell("checkpoint_failed", rank=1, step=10, why="no space left")
    job.tell("checkpoint_failed", rank=2, step=10, why="no space left")
    job.tell("checkpoint_missed", step=10)
    assert job.value("tft_updates_refused_total") == 1
    assert job.value("tft_faults_total", kind="numeric") == 2
    assert job.value("tft_checkpoints_missed_total") == 1


def test_series_stay_few_whatever_is_told() -> None:
    """When plugins bring names without end, and thousands of ranks are slow, then the number of
    series stays bounded: further names count as `other`, and only the slowest ranks are named."""
    job = Told()
    for n in range(1000):
        job.tell(f"remark_{n}")
        job.tell("strategy_chosen", incident=n + 1, strategy=f"own-{n}", why="")
        job.tell("incident_closed", incident=n + 1, strategy=f"own-{n}", step=1, seconds=1.0)
        job.tell("fault", incident=n + 1, kind=f"kind-{n}", rank=0, step=1)
        job.tell("rank_slow", rank=n, cause="input", seconds=n / 1000)
        job.beat(3, 3, node=n)
    read = job.metrics.read(job.now)
    assert len(read.events) == MOST_EVENTS + 1
    assert len(read.incidents) == MOST_NAMES + 1
    assert read.faults["other"] == 1000
    assert [slow.rank for slow in read.slowest] == list(range(999, 999 - MOST_SLOW, -1))
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: read))
    series = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert len(series) < 300


def test_slow_rank_is_shown_until_it_is_fast_again() -> None:
    """When a plugin remarks that a rank is slow, then the rank has a series, until the plugin
    remarks that it is not."""
    job = Told()
    job.tell("rank_slow", rank=3, node=1, step=9, cause="input", seconds=0.25, percent=30.0)
    assert job.value("tft_rank_slowness_seconds", rank="3", cause="input") == 0.25
    assert job.value("tft_ranks_slow") == 1
    job.tell("rank_slow_over", rank=3, node=1, step=40)
    assert job.value("tft_rank_slowness_seconds", rank="3", cause="input") is None
    assert job.value("tft_ranks_slow") == 0


@pytest.mark.parametrize(
    "event", ["fault", "state", "incident_closed", "rank_slow", "leads", "job_ends"]
)
def test_strange_facts_are_ignored(event: str) -> None:
    """When an event has other facts than expected, for example that of a plugin, then it is only
    counted."""
    job = Told()
    job.tell(event, kind=7, state=None, incident="one", rank="3", seconds="long", result=4)
    assert job.value("tft_job_state", state="healthy") == 1
    assert job.value("tft_incident_open") == job.value("tft_ranks_slow") == 0


# ---------------------------------------------------------------- heartbeats


def test_steps_and_ranks_come_from_all_nodes() -> None:
    """When nodes send heartbeats, then the lowest and the highest step are those of all training
    ranks. A node that is silent is left out, and the last steps stay when no rank trains."""
    job = Told()
    assert job.value("tft_step_lowest") is None
    job.beat(5, 4, node=0)
    job.beat(6, None, node=1, after=0.1)
    assert (job.value("tft_step_lowest"), job.value("tft_step_highest")) == (4, 6)
    assert (job.value("tft_nodes"), job.value("tft_ranks")) == (2, 4)
    assert job.value("tft_ranks_training") == 3
    job.beat(7, 7, node=1, after=SILENT + 1)
    assert (job.value("tft_nodes"), job.value("tft_step_lowest")) == (1, 7)
    job.beat(None, None, node=1, after=0.1)
    assert (job.value("tft_ranks_training"), job.value("tft_step_lowest")) == (0, 7)


def test_time_of_a_step_is_that_between_two_steps_of_the_fastest_rank() -> None:
    """When steps are quicker than heartbeats, then each step counts with their mean. The time of an
    incident is not part of a step, and neither is the way back."""
    job = Told()
    job.beat(1, 1)
    job.beat(3, 2, after=1.0)
    assert job.value("tft_step_duration_seconds_count") == 2
    assert job.value("tft_step_duration_seconds_sum") == 1
    job.tell("state", state="freezing", incident=1)
    job.beat(3, 3, after=5.0)
    job.tell("state", state="resuming", incident=1)
    job.beat(2, 2, after=5.0)
    job.beat(3, 3, after=0.25)
    assert job.value("tft_step_duration_seconds_count") == 3
    assert job.value("tft_step_duration_seconds_sum") == 1.25


# ---------------------------------------------------------------- health


def test_standstill_is_unhealthy_after_the_limit() -> None:
    """When the ranks train but make no progress, then the job is not healthy after 660 s, or after
    60 s when the times of short steps are known."""
    job = Told()
    job.beat(0, 0, moved=1.0)  # on the clock of the node
    job.beat(0, 0, moved=1.0, after=FIRST - 1)
    assert job.health().ok
    job.beat(0, 0, moved=1.0, after=2)
    assert not job.health().ok
    for step in range(1, LEARNT + 3):
        job.beat(step, step, moved=700.0 + step / 10, after=0.1)
    job.beat(7, 7, moved=701.0, after=1)
    job.beat(7, 7, moved=701.0, after=FLOOR - 1)
    assert job.health() == Health(
        ok=True, why="the job is healthy, and all ranks have completed step 7"
    )
    job.beat(7, 7, moved=701.0, after=2)
    assert job.value("tft_job_healthy") == 0


def test_first_step_after_an_incident_may_take_longer() -> None:
    """When an incident is over, then its first step has 660 s, and the time of the incident does
    not count."""
    job = Told()
    for step in range(1, LEARNT + 3):
        job.beat(step, step, after=0.1)
    job.tell("fault", incident=1, kind="process", rank=0, step=7)
    job.tell("state", state="freezing", incident=1)
    job.beat(None, 6, after=1000)
    assert job.health().ok
    job.tell("state", state="resuming", incident=1)
    job.beat(6, 6, moved=5.0, after=1)
    job.beat(6, 6, moved=5.0, after=FIRST - 5)
    assert job.health().ok
    job.beat(6, 6, moved=5.0, after=10)
    assert not job.health().ok


def test_announced_phase_is_no_standstill() -> None:
    """When a rank announces that it will make no progress for 500 s, as for a checkpoint, then this
    time does not count."""
    job = Told()
    for step in range(1, LEARNT + 3):
        job.beat(step, step, after=0.1)
    announced = job.now + 500
    for rank in range(8):
        job.beat(8, 8, moved=announced + rank / 100, after=0.1)
    job.beat(8, 8, moved=announced + 0.07, after=499)
    assert job.value("tft_progress_age_seconds") == pytest.approx(0, abs=1)
    job.beat(8, 8, moved=announced + 0.07, after=FLOOR + 1)
    assert not job.health().ok


def test_heartbeats_that_were_held_up_announce_nothing() -> None:
    """When heartbeats arrive 100 s late, all at once, then the times that follow are not taken for
    announced phases: a later standstill is noticed."""
    job = Told()
    for step in range(1, LEARNT + 3):
        job.beat(step, step, after=0.1)
    behind = job.now
    job.now += 100
    for late in range(1, 101):
        job.beat(6 + late, 6 + late, moved=behind + late)
    job.beat(120, 120, after=1)
    job.beat(120, 120, moved=job.now, after=100 * FLOOR)
    assert not job.health().ok


def test_clock_that_seemed_behind_is_learnt_within_three_steps() -> None:
    """When the ranks of a node stood still at its first heartbeat, then its clock seems to run ahead
    afterwards, and after three steps this is known."""
    job = Told()
    job.beat(0, 0, moved=job.now - 500)
    for step in range(1, LEARNT + 3):
        job.beat(step, step, after=0.1)
    job.beat(7, 7, moved=job.now, after=FLOOR + 1)
    assert not job.health().ok


def test_time_without_progress_grows_while_no_rank_trains() -> None:
    """When all ranks leave their loops in an incident, then the time since the last progress grows,
    also if a rank had announced a long phase. It begins again when the ranks are let train."""
    job = Told()
    job.beat(1, 1)
    job.beat(2, 2, after=1)
    job.beat(2, 2, moved=job.now + 500, after=1)
    job.tell("state", state="freezing", incident=1)
    job.beat(None, None, after=1)
    assert job.value("tft_progress_age_seconds") == 1
    job.beat(None, None, after=600)
    assert job.value("tft_progress_age_seconds") == 601
    job.tell("state", state="resuming", incident=1)
    assert job.value("tft_progress_age_seconds") == 0


def test_ranks_outside_of_their_loop_need_no_progress() -> None:
    """When no rank is in its training loop, or the job is paused, then the job is healthy."""
    job = Told()
    job.beat(None, None)
    job.beat(None, None, after=10_000)
    assert job.health().why == "the job is healthy, and no rank is in its training loop"
    job.tell("state", state="paused", incident=0)
    assert job.health() == Health(ok=True, why="the job is paused")


def test_silence_and_a_loop_that_stands_are_unhealthy() -> None:
    """When no heartbeat arrives while ranks should train, or the event loop of the controller does
    not turn, then the job is not healthy."""
    job = Told()
    job.beat(1)
    job.now += SILENT + 1
    job.metrics.turned(job.now)
    assert job.health().why == "no node has sent a heartbeat for 11 s"
    job.beat(2)
    assert job.health().ok
    job.now += LOOP + 1
    assert job.health().why == "the event loop of the controller has not turned for 6 s"


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0, "127.0.0.1:0"),
        ("localhost:9464", "localhost", 9464, "localhost:9464"),
        ("[::1]:9464", "::1", 9464, "[::1]:9464"),
        ("0.0.0.0:9464 insecure", "0.0.0.0", 9464, "0.0.0.0:9464"),
    ],
)
def test_address_is_read_and_written_alike(text: str, host: str, port: int, target: str) -> None:
    """When an address is passed on to the controller, then the controller reads the same one."""
    address = Address.read(text, "--metrics")
    assert (address.host, address.port, address.target) == (host, port, target)
    assert address.text() == text


@pytest.mark.parametrize(
    "text", ["", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
             "127.0.0.1:9464 please"]
)  # fmt: skip
def test_text_that_is_no_address_is_refused(text: str) -> None:
    """When the text has no address or no port, then it is refused with an example."""
    with pytest.raises(UsageError, match=r"expected is ADDRESS:PORT, such as 127\.0\.0\.1:9464"):
        Address.read(text, "--metrics")


@pytest.mark.parametrize("text", ["0.0.0.0:9464", "10.0.0.1:9464", "[::]:9464", "node-3:9464"])
def test_address_that_others_reach_needs_consent(text: str) -> None:
    """When other machines can reach the address, then it is refused without --insecure."""
    with pytest.raises(UsageError, match="can be reached from other machines"):
        Address.read(text, "--metrics")


OPTIONS = {
    "metrics": "127.0.0.1:0", "metrics_file": None, "insecure": False, "led_elsewhere": False,
    "node_rank": 0,
}  # fmt: skip


def test_only_the_node_with_the_controller_serves() -> None:
    """When node 0 runs the controller, then its processes get the address, and those of other nodes
    do not. If `tft lead` runs the controller, then the option is refused."""
    plugin = Plugin()
    assert plugin.tft_environment(OPTIONS) == {"TFT_METRICS": "127.0.0.1:0"}
    assert plugin.tft_environment({**OPTIONS, "node_rank": 1}) == {}
    assert plugin.tft_environment({**OPTIONS, "metrics": None}) == {}
    with pytest.raises(UsageError, match=r"TFT_METRICS=127\.0\.0\.1:0 for `tft lead`"):
        plugin.tft_environment({**OPTIONS, "led_elsewhere": True})


def test_file_for_the_address_is_checked(tmp_path: Path) -> None:
    """When a file is named that Prometheus could not read, or whose directory does not exist, then
    the run is refused."""
    plugin, file = Plugin(), tmp_path / "job.json"
    assert plugin.tft_environment({**OPTIONS, "metrics_file": file}) == {
        "TFT_METRICS": "127.0.0.1:0", "TFT_METRICS_FILE": str(file),
    }  # fmt: skip
    for wrong, why in (
        (tmp_path / "job.txt", r"only if its name ends in \.json"),
        (tmp_path / "none" / "job.json", "does not exist"),
    ):
        with pytest.raises(UsageError, match=why):
            plugin.tft_environment({**OPTIONS, "metrics_file": wrong})
    with pytest.raises(UsageError, match="does nothing without --metrics"):
        plugin.tft_environment({**OPTIONS, "metrics": None, "metrics_file": file})


def test_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the library of the extra is not installed, then the run is refused with a sentence that
    says how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'tft-bus\[prometheus\]'"):
        Plugin().tft_environment(OPTIONS)


def test_consent_is_passed_on_to_the_controller() -> None:
    """When --insecure is given, then the controller serves at an address that others reach."""
    options = {**OPTIONS, "metrics": "0.0.0.0:0", "insecure": True}
    (text,) = Plugin().tft_environment(options).values()
    assert Address.read(text, "TFT_METRICS").insecure


def test_port_in_use_is_refused() -> None:
    """When another process listens at the port, then the run is refused before it starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="cannot be served there: Address already in use"):
            Plugin().tft_environment({**OPTIONS, "metrics": f"127.0.0.1:{port}"})


# ---------------------------------------------------------------- the server


@contextmanager
def served(run_dir: Path, address: str, health: Sequence[Health] = ()) -> Iterator[str]:
    """
    Serve the metrics of a job, and yield the address that the file in the run directory names.
    """
    job, answers = Told(), iter(health)
    app = application(lambda: job.metrics.read(job.now), lambda: next(answers))
    server = open_server(Address.read(address, "--metrics"), run_dir / FILE, "/d", app)
    with running(server):
        ((target,),) = (entry["targets"] for entry in json.loads((run_dir / FILE).read_text()))
        yield target


@contextmanager
def running(server: MetricsServer) -> Iterator[None]:
    """
    Answer requests on a thread, until the end of the `with` block.
    """
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def got(url: str) -> tuple[int, str]:
    """
    Return the status and the text of a page.
    """
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def test_server_answers_with_metrics_and_health(tmp_path: Path) -> None:
    """When the server runs, then /metrics has the metrics, /healthz the sentence with its status,
    and other paths are not found."""
    health = (Health(ok=True, why="all is well"), Health(ok=False, why="nothing moves"))
    with served(tmp_path, "127.0.0.1:0", health) as target:
        status, text = got(f"http://{target}/metrics")
        assert status == 200
        assert 'tft_job_info{directory="/d",job_name="j",run="r"} 1.0' in text
        assert got(f"http://{target}/healthz") == (200, "all is well\n")
        assert got(f"http://{target}/healthz") == (503, "nothing moves\n")
        assert got(f"http://{target}/") == (404, "there are /metrics and /healthz\n")


def test_idle_connections_do_not_keep_the_server_from_answering(tmp_path: Path) -> None:
    """When clients connect and send nothing, then at most 8 of them are held, and when one of them
    leaves, the next request is answered."""
    with served(tmp_path, "127.0.0.1:0", [Health(ok=True, why="")]) as target:
        host, _, port = target.partition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(AT_ONCE)]
        with socket.create_connection((host, int(port))) as further:
            assert further.recv(1) == b""  # closed at once
        for each in idle:
            each.close()
        status = 0
        for _ in range(200):  # the threads learn of the end of their connections soon
            try:
                status, _ = got(f"http://{target}/healthz")
                break
            except OSError:
                threading.Event().wait(0.01)
        assert status == 200


def test_port_that_is_in_use_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another process has the port, then this is logged once, and the metrics are served as
    soon as the port is free."""
    monkeypatch.setattr("tft_prometheus.server.AGAIN", 0.01)
    taken = socket.create_server(("127.0.0.1", 0))
    address = Address(host="127.0.0.1", port=taken.getsockname()[1])
    app = application(lambda: Told().metrics.read(0.0), lambda: Health(ok=True, why="served"))
    with structlog.testing.capture_logs() as lines, ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_server, address, tmp_path / FILE, "/d", app)
        with pytest.raises(TimeoutError):
            opened.result(timeout=0.2)  # several attempts
        taken.close()
        server = opened.result(timeout=10)
    assert [line["event"] for line in lines] == ["metrics_not_served", "metrics_served"]
    with running(server):
        assert got(f"http://{address.target}/healthz") == (200, "served\n")


def test_controller_without_metrics_prepares_no_heartbeats() -> None:
    """When no metrics are asked for, then the plugin has no hook of the controller, so that
    heartbeats need not be prepared for it."""
    assert hasattr(ServingPlugin(), "tft_on_beat")
    assert not hasattr(Plugin(), "tft_on_beat")
    assert type(tft_prometheus.plugin) is Plugin


def test_wrong_address_in_the_environment_does_not_stop_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the operator has set an address that others reach, without consent, then the controller
    logs why it serves no metrics, and goes on."""
    monkeypatch.setenv("TFT_METRICS", "0.0.0.0:9464")
    plugin = ServingPlugin()
    with structlog.testing.capture_logs() as lines:
        plugin.tft_on_event("leads", LEADS)
        plugin.tft_on_leader()
        plugin.tft_on_beat(0, ())
    (line,) = lines
    assert line["event"] == "metrics_not_served"
    assert "can be reached from other machines" in line["why"]


def test_freely_chosen_port_is_that_of_the_controller_before(tmp_path: Path) -> None:
    """When port 0 is asked for and an earlier controller of the run directory had chosen a port,
    then this port is used again. A file that cannot be understood is ignored."""
    free = Address(host="127.0.0.1", port=0)
    assert earlier_port(tmp_path / FILE, free) == 0
    (tmp_path / FILE).write_text('[{"targets": ["127.0.0.1:4711"]}]')
    assert earlier_port(tmp_path / FILE, free) == 4711
    assert earlier_port(tmp_path / FILE, Address(host="127.0.0.1", port=9464)) == 0
    (tmp_path / FILE).write_text('{"targets": 3}')
    assert earlier_port(tmp_path / FILE, free) == 0


def test_reaching_the_limits_of_names_is_stated_in_the_documentation() -> None:
    """When a limit changes, then the page about metrics must say so."""
    page = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    for limit in (MOST_EVENTS, MOST_SLOW, MOST_NAMES):
        assert str(limit) in page
    names = {f"`{name}" for name in _names()}
    assert {name for name in names if name not in page} == set()


def test_examples_use_metrics_that_exist() -> None:
    """When a metric is renamed, then the dashboard and the alerts must follow."""
    known = _names()
    histograms = {name for name in known if name.endswith("_duration_seconds")}
    known |= {f"{name}_{part}" for name in histograms for part in ("sum", "count", "bucket")}
    for file in ("dashboard.json", "alerts.yml", "alerts_test.yml"):
        text = (EXAMPLES / file).read_text()
        used = set(re.findall(r"\btft_[a-z_]+", text))
        assert used
        assert used - known == set(), file


def _names() -> set[str]:
    """
    Return the names of all metrics.
    """
    job = Told()
    job.beat(1)
    families = JobCollector(lambda: job.metrics.read(job.now)).collect()
    suffixes = {"counter": "_total", "info": "_info"}
    return {family.name + suffixes.get(family.type, "") for family in families}
