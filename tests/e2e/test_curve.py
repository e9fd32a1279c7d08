"""
Jobs with encryption keys: two nodes on one machine, with all messages between them encrypted.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import Job, Outcome, identical, job, left_behind, reached, strike, until
from tft.bus.ports import free_address
from tft.keys import make_keys

LIMIT = 60.0


@contextmanager
def node(run_dir: Path, number: int, broker: str, curve: Path | None) -> Iterator[Job]:
    """
    Start one of two nodes, with two ranks, whose steps are slow enough for requests during the job.
    """
    keys = () if curve is None else ("--curve", str(curve))
    with job(
        run_dir,
        *("--adaptor", "fake", "--nnodes", "2", "--node-rank", str(number)),
        *("--job", "a-job-with-keys", "--broker", broker, *keys),
        script=FAKE,
        arguments=(str(FAKE_STEPS), "--seconds", "0.05"),
        nproc=2,
    ) as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.soak
def test_a_job_of_two_nodes_with_keys_survives_kills(
    tmp_path: Path, keys: Path, fake_undisturbed: Outcome
) -> None:
    """When a rank of a job with keys is killed, then the broker, and then a rank of the other node,
    then losses and final state are those of the undisturbed run, with state fetched from the other
    node. A user with the run directory and the keys can send commands to the job."""
    broker = free_address("127.0.0.1")
    with (
        node(tmp_path / "run", 0, broker, keys) as first,
        node(tmp_path / "run", 1, broker, keys) as second,
    ):
        # This wait covers the start of Python for `tft run` and then for the ranks. Therefore it
        # has the longer limit.
        until(reached(first, 20), "step 20", LIMIT)
        strike(first, "rank-1")
        until(reached(first, 50), "step 50")
        before = first.pid("broker")
        strike(first, "broker")
        until(lambda: first.pid("broker") != before, "a new broker")
        strike(first, "rank-2")
        until(reached(first, 80), "step 80")
        assert first.asked("pause") == (
            0,
            "tft: the job stands still; `tft resume` lets it go on\n",
        )
        assert first.asked("resume")[0] == 0
        outcomes = [first.end(LIMIT), second.end(LIMIT)]

    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert left_behind(first.run_dir) == []
    identical(outcomes[0], fake_undisturbed)
    assert {incident["strategy"] for incident in outcomes[0].incidents} == {"recover"}
    assert {incident["steps_lost"] for incident in outcomes[0].incidents} == {0}
    fetched = [path.read_text() for path in (tmp_path / "run" / "logs").glob("rank-*")]
    assert any("shard_fetched" in text for text in fetched)


@pytest.mark.soak
@pytest.mark.parametrize("wrong", ["of another job", "none"])
def test_a_node_with_wrong_keys_is_refused_and_ends(tmp_path: Path, keys: Path, wrong: str) -> None:
    """When node 1 is started with the keys of another job, or without keys, then it is refused,
    reports that at once, and has ended ten seconds later. Node 0 still waits."""
    others = None
    if wrong == "of another job":
        others = tmp_path / "others"
        make_keys(others)
    broker = free_address("127.0.0.1")
    log = tmp_path / "run" / "logs" / "broker.log"
    with (
        node(tmp_path / "run", 0, broker, keys) as first,
        node(tmp_path / "run", 1, broker, others) as second,
    ):
        outcome = second.end(LIMIT)
        assert first.process.poll() is None
        first.process.send_signal(signal.SIGTERM)
        first.end(LIMIT)

    assert outcome.code == 2
    assert f"at {broker}" in outcome.output
    assert "--curve" in outcome.output
    assert "peer_refused" in log.read_text()


def test_a_run_directory_contains_no_key(
    tmp_path: Path, keys: Path, fake_undisturbed: Outcome
) -> None:
    """When a job with keys has run, then its run directory names the place of the keys, and
    contains no key."""
    arguments = (str(FAKE_STEPS),)
    with job(
        tmp_path / "run",
        "--adaptor",
        "fake",
        "--curve",
        str(keys),
        script=FAKE,
        arguments=arguments,
    ) as running:
        outcome = running.end(LIMIT)

    identical(outcome, fake_undisturbed)
    kept = json.loads((tmp_path / "run" / "job.json").read_text())
    assert kept["settings"]["curve"] == str(keys)
    secrets = [(keys / name).read_bytes() for name in ("broker.key", "job.key", "transfer.key")]
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            held = path.read_bytes()
            assert not any(secret in held for secret in secrets), path
