"""
Transfers with the keys of a job: other processes can neither fetch a shard nor read the transferred
bytes.
"""

import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.transfer.peers import Opened, Room, Tap, content, fetch_into, serve
from tft.errors import TransferFailed, UsageError
from tft.keys import make_keys
from tft.transfer import Tls, read_tls

SHARD = {"weights": content(3_000_000), "bias": b"a bias that nobody is to see" * 10, "none": b""}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "job"
    make_keys(directory)
    return directory


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "others"
    make_keys(directory)
    return directory


def tls(directory: Path) -> Tls:
    made = read_tls(directory)
    assert made is not None
    return made


def test_shard_is_fetched_completely_from_several_sources_with_tls(
    opened: Opened, keys: Path
) -> None:
    """When the client and all sources have the keys of the job, then the fetched shard is complete."""
    sources = [opened(serve(SHARD, tls=tls(keys))) for _ in range(3)]
    room = Room(SHARD)

    fetch_into(room, *(source.address for source in sources), tls=tls(keys))

    assert room.whole()
    assert len(room.taken) == 1


@pytest.mark.parametrize("encrypted", [True, False])
def test_transfer_with_keys_cannot_be_read_on_the_network(
    opened: Opened, keys: Path, encrypted: bool
) -> None:
    """When all bytes on the way are recorded, then they contain neither the state nor the job name.
    Without keys they contain both."""
    passed: dict[str, bytearray] = {"up": bytearray(), "down": bytearray()}
    source = opened(serve(SHARD, tls=tls(keys) if encrypted else None))
    tap = opened(
        Tap(
            source.address,
            down=lambda _, piece: passed["down"].extend(piece),
            up=lambda _, piece: passed["up"].extend(piece),
        )
    )
    room = Room(SHARD)

    fetch_into(room, tap.address, tls=tls(keys) if encrypted else None)
    tap.close()

    assert room.whole()
    assert (b"that nobody is to see" in passed["down"]) is not encrypted
    assert (b"job-of-the-test" in passed["up"]) is not encrypted


def test_bytes_changed_on_the_way_are_not_used(opened: Opened, keys: Path) -> None:
    """When a bit is flipped on the way from one source, then another source delivers the complete
    shard."""

    def damage(position: int, piece: bytearray) -> None:
        if position > 500_000:
            piece[0] ^= 1

    source = opened(serve(SHARD, tls=tls(keys)))
    tap = opened(Tap(source.address, down=damage))
    good = opened(serve(SHARD, tls=tls(keys)))
    room = Room(SHARD)

    fetch_into(room, tap.address, good.address, tls=tls(keys))

    assert room.whole()


@pytest.mark.parametrize("who", ["of another job", "plain"])
def test_client_without_a_key_of_the_job_fetches_nothing(
    opened: Opened, keys: Path, others: Path, who: str
) -> None:
    """When a client has keys of another job, or none, then the client gets no byte. The server logs
    the reason."""
    source = opened(serve(SHARD, tls=tls(keys)))
    room = Room(SHARD)

    with capture_logs() as logs:
        with pytest.raises(TransferFailed) as failed:
            fetch_into(room, source.address, tls=tls(others) if who == "of another job" else None)
        source.close()

    assert not any(map(any, room.memory.values()))
    if who == "of another job":
        assert "was the source started with the same --curve?" in str(failed.value)
    [refused] = [log for log in logs if log["event"] == "shard_client_dropped"]
    assert "was the client started with the same --curve?" in refused["why"]


def test_source_without_the_key_of_the_job_is_refused(
    opened: Opened, keys: Path, others: Path
) -> None:
    """When sources have keys of another job, or none, then the client takes nothing from them."""
    pretending = opened(serve(SHARD, tls=tls(others)))
    plain = opened(serve(SHARD))
    room = Room(SHARD)

    with pytest.raises(TransferFailed, match="was the source started with the same --curve"):
        fetch_into(room, pretending.address, plain.address, tls=tls(keys))

    assert not any(map(any, room.memory.values()))


def test_silent_source_is_lost_after_the_patience(keys: Path) -> None:
    """When a source accepts a connection and then sends nothing, then the source is lost after the
    patience of the fetch."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TransferFailed, match="the source has sent nothing for"):
            fetch_into(Room(SHARD), address, tls=tls(keys), patience=0.2)


def test_silent_client_does_not_delay_the_close_of_the_server(opened: Opened, keys: Path) -> None:
    """When a client connects and never begins a handshake, then the server can be closed at once."""
    source = serve(SHARD, tls=tls(keys))
    host, _, port = source.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        # after this fetch, the server has accepted the earlier, silent connection too
        fetch_into(Room(SHARD), source.address, tls=tls(keys))

        source.close()


def test_key_and_certificate_that_do_not_match_are_refused(
    keys: Path, others: Path, tmp_path: Path
) -> None:
    """When the key of one job is beside the certificate of another job, then the error says that
    the two files are not a pair."""
    for directory, name in ((keys, "transfer.key"), (others, "transfer.crt")):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
        (tmp_path / name).chmod(0o600)

    with pytest.raises(UsageError, match=r"transfer\.key and transfer\.crt are not a pair"):
        read_tls(tmp_path)
