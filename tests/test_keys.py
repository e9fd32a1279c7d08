"""
The keys of a job as files: made once, readable only by their owner, and refused with a sentence.
"""

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tft.errors import UsageError
from tft.keys import (
    BROKER,
    JOB,
    SEED,
    TRANSFER,
    make_keys,
    read_keys,
    share_keys,
    transfer_files,
)

NAMES = {*BROKER, *JOB, *TRANSFER}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    make_keys(directory)
    return directory


def test_keys_are_readable_by_their_owner_only(keys: Path) -> None:
    """When keys are made, then only their owner can read them, with any umask."""
    assert {path.name for path in keys.iterdir()} == NAMES
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700


def test_keys_are_read_and_secrets_are_not_printed(keys: Path) -> None:
    """When keys are read, then only the broker gets the broker's secret key. Printed keys show no
    secret."""
    read = read_keys(keys, broker=True)

    assert read.broker_secret == (keys / BROKER[0]).read_bytes()
    assert read_keys(keys).broker_secret == b""
    assert read.secret.decode() not in repr(read)
    assert read.broker_secret.decode() not in repr(read)
    assert transfer_files(keys) == (keys / TRANSFER[0], keys / TRANSFER[1])


def test_keys_of_two_jobs_differ_in_every_file(keys: Path, tmp_path: Path) -> None:
    """When keys are made in two directories, then no file is the same in both."""
    make_keys(tmp_path / "others")

    assert all((keys / n).read_bytes() != (tmp_path / "others" / n).read_bytes() for n in NAMES)


def test_same_secret_gives_the_same_keys_on_each_machine(tmp_path: Path) -> None:
    """When two machines make keys from the same secret, then the keys are the same. Another secret
    gives other keys."""
    for name, seed in (("a", b"s" * SEED), ("b", b"s" * SEED), ("c", b"t" * SEED)):
        make_keys(tmp_path / name, seed)

    for name in NAMES:
        a, b, c = ((tmp_path / each / name).read_bytes() for each in "abc")
        assert a == b != c


@pytest.mark.parametrize("there", [*sorted(NAMES)])
def test_existing_key_files_are_not_overwritten(tmp_path: Path, there: str) -> None:
    """When one of the key files already exists, then making keys is refused. The file is unchanged,
    and no other file is added."""
    (tmp_path / there).write_text("another job's")

    with pytest.raises(UsageError, match=f"has keys already .{there}."):
        make_keys(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "another job's"


def test_error_names_a_key_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """When there is a file in place of the directory, then the error names it."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=r"cannot be written to .*file"):
        make_keys(tmp_path / "file")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda keys: (keys / "job.key").unlink(), "there is no .*job.key"),
    "missing public": (lambda keys: (keys / "broker.pub").unlink(), "there is no .*broker.pub"),
    "missing secret": (lambda keys: (keys / "broker.key").unlink(), "there is no .*broker.key"),
    "readable": (lambda keys: (keys / "job.key").chmod(0o640), "chmod 600 .*job.key"),
    "of all": (lambda keys: (keys / "broker.key").chmod(0o604), "chmod 600 .*broker.key"),
    "public, of all": (lambda keys: (keys / "broker.pub").chmod(0o666), "chmod 600 .*broker.pub"),
    "directory": (lambda keys: keys.chmod(0o770), "chmod go-w"),
    "cut": (lambda keys: (keys / "job.key").write_bytes(b"short"), "job.key contains no key"),
    "no letters": (
        lambda keys: (keys / "job.pub").write_bytes(b"~" * 40),
        "job.pub contains no key",
    ),
    "other job": (
        lambda keys: (keys / "job.pub").write_bytes((keys / "broker.pub").read_bytes()),
        "job.key and job.pub are not a pair",
    ),
    "other broker": (
        lambda keys: (keys / "broker.key").write_bytes((keys / "job.key").read_bytes()),
        "broker.key and broker.pub are not a pair",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unusable_keys_are_refused(keys: Path, damage: str) -> None:
    """When a key file is missing, readable by others, damaged or of other keys, then the error
    names the file."""
    do, sentence = DAMAGES[damage]
    do(keys)

    with pytest.raises(UsageError, match=sentence):
        read_keys(keys, broker=True)


def test_node_without_the_broker_does_not_need_the_brokers_secret(keys: Path) -> None:
    """When the broker runs on another node, then the broker's secret key need not be on this node."""
    (keys / "broker.key").unlink()

    assert read_keys(keys).public


@pytest.mark.parametrize("name", TRANSFER)
def test_keys_of_the_transfer_ports_are_checked(keys: Path, name: str) -> None:
    """When a key of the transfer ports is missing or readable by others, then this is refused
    before the ports are opened."""
    (keys / name).chmod(0o644)
    with pytest.raises(UsageError, match=f"chmod 600 .*{name}"):
        transfer_files(keys)
    (keys / name).unlink()
    with pytest.raises(UsageError, match=f"there is no .*{name}"):
        transfer_files(keys)


def test_threads_with_one_secret_can_make_their_keys_at_once(tmp_path: Path) -> None:
    """When several threads make the keys of one secret in one directory at once, then the keys
    exist once and whole. No other file is left."""
    where = tmp_path / "of-all" / "keys"
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(share_keys, where, b"s" * SEED) for _ in range(8)]:
            done.result()

    assert {path.name for path in where.iterdir()} == NAMES
    assert [path.name for path in where.parent.iterdir()] == ["keys"]


def test_key_directory_of_another_secret_is_refused(tmp_path: Path) -> None:
    """When a directory has keys of another secret, then it is refused, and the keys stay unchanged."""
    share_keys(tmp_path / "keys", b"s" * SEED)

    with pytest.raises(UsageError, match="does not match the secret of the job"):
        share_keys(tmp_path / "keys", b"t" * SEED)

    share_keys(tmp_path / "keys", b"s" * SEED)
