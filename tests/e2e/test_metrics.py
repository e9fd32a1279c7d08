"""
The metrics of real jobs: what is served agrees with the report, and Prometheus reads it and alerts.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.jobs import ROOT, Job, job, strike, until

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
EXAMPLE = ROOT / "examples" / "prometheus"
Samples = dict[tuple[str, str], float]


def page(url: str) -> str:
    """
    Return the text of a page, or an empty text if nothing answers, as between two controllers.
    """
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.read().decode()
    except OSError:
        return ""


def samples(target: str) -> Samples:
    """
    Return all samples that a job serves, by name and value of the label. Of several labels only the
    last one counts.
    """
    families = text_string_to_metric_families(page(f"http://{target}/metrics"))
    return {
        (sample.name, [*sample.labels.values(), ""][0]): sample.value
        for family in families
        for sample in family.samples
    }


def target_of(file: Path) -> str:
    """
    Return the address that a job has written, and wait for it.
    """
    until(file.exists, f"{file} exists")
    ((target,),) = (entry["targets"] for entry in json.loads(file.read_text()))
    return str(target)


def test_metrics_agree_with_the_report_and_outlive_the_controller(tmp_path: Path) -> None:
    """When a rank is killed, then the metrics count the incident as the report does. When the
    controller is killed too, then the next one serves at the same address, and its counters begin
    again. The file with the address is gone when the job has completed."""
    run_dir = tmp_path / "run"
    with job(
        run_dir, "--metrics", "127.0.0.1:0", "--adaptor", "fake",
        "--chaos", "kill:rank=1,step=20,phase=between",
        script=FAKE, arguments=("300", "--seconds", "0.03"), nproc=2,
    ) as running:  # fmt: skip
        target = target_of(run_dir / "metrics.json")
        healed = ("tft_incidents_total", "recover")
        until(lambda: samples(target).get(healed) == 1, "the incident is counted")
        until(lambda: samples(target).get(("tft_step_lowest", ""), 0) > 21, "the ranks train on")
        seen = samples(target)
        health = page(f"http://{target}/healthz")
        strike(running, "controller")
        until(lambda: samples(target).get(healed) == 0, "the next controller serves there")
        until(lambda: samples(target).get(("tft_step_highest", ""), 0) > 20, "it knows the steps")
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert seen["tft_faults_total", "process"] == len(incident["faults"]) == 1
    assert seen["tft_steps_lost_total", ""] == incident["steps_lost"] == 0
    assert seen["tft_processes_started_total", ""] == incident["processes_started"] == 1
    took = seen["tft_incident_duration_seconds_sum", ""]
    assert took == pytest.approx(incident["seconds"]["total"], abs=0.5)
    assert seen["tft_incident_open", ""] == 0
    assert seen["tft_job_ranks", ""] == seen["tft_ranks", ""] == 2
    assert 20 <= seen["tft_step_lowest", ""] <= seen["tft_step_highest", ""]
    assert seen["tft_job_healthy", ""] == 1
    assert health.startswith("the job is healthy, and all ranks have completed step ")
    assert not (run_dir / "metrics.json").exists()


# ---------------------------------------------------------------- Prometheus itself


def tool(name: str) -> str:
    """
    Return the path of a program of Prometheus. Skip the test if it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: it is in Debian's package prometheus")
    return found


def checked(*command: str, given: str = "") -> str:
    """
    Run a command that must succeed, and return what it prints.
    """
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=60, check=False, cwd=EXAMPLE
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def test_alert_rules_do_what_they_say() -> None:
    """When the metrics have given values, then the alerts of the example fire after the time that
    their rules say, and not before."""
    promtool = tool("promtool")
    assert "SUCCESS" in checked(promtool, "check", "config", "prometheus.yml")
    checked(promtool, "check", "rules", "alerts.yml")
    checked(promtool, "test", "rules", "alerts_test.yml")


@contextmanager
def prometheus(directory: Path) -> Iterator[Callable[[str], Any]]:  # Any: parsed JSON
    """
    Run Prometheus with the configuration of the example in a directory of its own, and yield a
    function that asks its API.
    """
    program = tool("prometheus")
    shutil.copytree(EXAMPLE, directory, dirs_exist_ok=True)
    (directory / "jobs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (directory / "out").open("w") as out:
        process = subprocess.Popen(
            [
                program, "--config.file", "prometheus.yml", "--storage.tsdb.path", "data",
                "--web.listen-address", address,
            ],
            cwd=directory, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def ask(path: str) -> Any:  # Any: parsed JSON
        text = page(f"http://{address}/api/v1/{path}")
        return json.loads(text).get("data", {}) if text else {}

    try:
        until(lambda: "Server is ready" in (directory / "out").read_text(), "Prometheus is ready")
        yield ask
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fires(ask: Callable[[str], Any], alert: str) -> bool:  # Any: parsed JSON
    """
    Return whether an alert fires now.
    """
    return any(
        each["labels"]["alertname"] == alert and each["state"] == "firing"
        for each in ask("alerts").get("alerts", ())
    )


def refused_expressions(ask: Callable[[str], Any]) -> list[str]:  # Any: parsed JSON
    """
    Return the expressions of the dashboard that Prometheus does not understand.
    """
    text = (EXAMPLE / "dashboard.json").read_text()
    for name, value in (("$job", "tft"), ("$instance", ".+"), ("$__rate_interval", "1m")):
        text = text.replace(name, value)
    dashboard = json.loads(text)
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    expressions = [each["expr"] for each in [*targets, *dashboard["annotations"]["list"]]]
    assert expressions
    return [each for each in expressions if "result" not in ask(f"query?query={quote(each)}")]


def failing_job(tmp_path: Path, file: Path) -> Any:  # Any: a context manager with a `Job`
    """
    Start a job that trains until rank 0 fails with a bug of its script.
    """
    return job(
        tmp_path / "run", "--metrics", "127.0.0.1:0", "--metrics-file", str(file),
        "--adaptor", "fake",
        script=FAKE, arguments=("2000", "--seconds", "0.05", "--bug", "0,900"), nproc=2,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_prometheus_reads_a_job_and_alerts(tmp_path: Path) -> None:
    """When Prometheus runs with the configuration of the example, then it finds the job by its
    file, and alerts when a rank is killed, and again when the job has failed."""
    with prometheus(tmp_path / "prometheus") as ask:
        file = tmp_path / "prometheus" / "jobs" / "job.json"
        with failing_job(tmp_path, file) as running:
            assert isinstance(running, Job)
            until(
                lambda: [t["health"] for t in ask("targets").get("activeTargets", ())] == ["up"],
                "Prometheus reads the job",
                40,
            )
            known = "query?query=tft_faults_total%7Bkind%3D%22process%22%7D"
            until(lambda: bool(ask(known).get("result")), "the counter is known", 20)
            checked(
                tool("promtool"),
                "check",
                "metrics",
                given=page(f"http://{target_of(file)}/metrics"),
            )
            assert refused_expressions(ask) == []
            assert not fires(ask, "TftIncident")
            strike(running, "rank-1")
            until(lambda: fires(ask, "TftIncident"), "the alert fires", 40)
            assert not fires(ask, "TftJobFailed")
            assert running.end().code != 0
        assert file.exists()
        until(lambda: fires(ask, "TftJobFailed"), "the second alert fires", 90)
