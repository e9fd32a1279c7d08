"""
The cryptographic keys of a job: files in a directory, which `tft keys` makes and all processes of
the job read.

    broker.key, broker.pub       the key pair of the broker: broker.pub identifies the broker
    job.key, job.pub             the key pair of the job: a process with job.key is accepted
    transfer.key, transfer.crt   the key and certificate for the TLS ports where ranks fetch state

All keys are derived from a secret of 32 bytes. So machines that already share a secret can each
make the same keys.
"""

import hmac
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import zmq
from zmq.utils import z85

from tft.errors import UsageError

SEED = 32
"""The number of bytes of the secret from which the keys are derived."""

BROKER = ("broker.key", "broker.pub")
JOB = ("job.key", "job.pub")
TRANSFER = ("transfer.key", "transfer.crt")

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KEY = 40
"""The number of characters of a CURVE key in the text encoding Z85."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """
    The keys for CURVE (the encryption of ZeroMQ) that a process has read.
    """

    broker: bytes
    """The public key of the broker."""
    public: bytes
    """The public key of the job, which all processes of the job share."""
    secret: bytes = field(repr=False)
    """The secret key of the job."""
    broker_secret: bytes = field(default=b"", repr=False)
    """The secret key of the broker. Empty in every process except the broker (see `read_keys`)."""


def make_keys(directory: Path, seed: bytes | None = None) -> None:
    """
    Make the keys of a job in a directory. The keys are derived from the secret `seed` of `SEED`
    bytes; None means a random secret. The directory is created when it does not exist.

    Raises `UsageError` when one of the key files exists already, when `seed` has another length, or
    when the package `cryptography` is missing. In these cases no file is written. Raises
    `UsageError` also when the key files cannot be written.
    """
    files = _files(os.urandom(SEED) if seed is None else seed)
    there = [name for name in files if (directory / name).exists()]
    if there:
        raise UsageError(
            f"{directory} has keys already ({', '.join(there)}), which are not overwritten "
            "because a job may be using them. Choose another directory"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            _write(directory / name, content)
    except OSError as refused:
        raise UsageError(f"the keys cannot be written to {directory}: {refused.strerror}") from None


def share_keys(directory: Path, seed: bytes) -> None:
    """
    Derive the keys of a job from the secret `seed`, and write the keys to a directory, unless the
    directory exists already. Other processes with the same secret may call this function at the
    same time.

    Raises `UsageError` when the directory contains keys of another secret.
    """
    files = _files(seed)
    if not directory.exists():
        mine = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
        make_keys(mine, seed)
        try:
            mine.rename(directory)
        # the rename fails if another process has just made the directory: use that directory, and
        # remove the directory of this process
        except OSError:
            shutil.rmtree(mine)
    _check_directory(directory)
    for name, content in files.items():
        if _read(directory / name) != content:
            raise UsageError(
                f"the key {directory / name} does not match the secret of the job: remove "
                f"{directory}, so that tft makes the keys anew"
            )


def read_keys(directory: Path, *, broker: bool = False) -> Keys:
    """
    Read the keys of a job from a directory, and return them. If `broker` is true, also read the
    secret key of the broker.

    Raises `UsageError` when a key file is missing, when users other than the owner of the file can
    access it, or when a public key does not belong to its secret key.
    """
    _check_directory(directory)
    secret, public = (_key(directory / name) for name in JOB)
    _check_pair(directory, JOB, secret, public)
    known = _key(directory / BROKER[1])
    broker_secret = b""
    if broker:
        broker_secret = _key(directory / BROKER[0])
        _check_pair(directory, BROKER, broker_secret, known)
    return Keys(broker=known, public=public, secret=secret, broker_secret=broker_secret)


def transfer_files(directory: Path) -> tuple[Path, Path]:
    """
    Return the paths of the key and of the certificate for the TLS ports where ranks fetch state.

    Raises `UsageError` when a file is missing, or when users other than its owner can access the
    file.
    """
    _check_directory(directory)
    key, certificate = (directory / name for name in TRANSFER)
    for path in (key, certificate):
        _read(path)
    return key, certificate


# ---------------------------------------------------------------- making keys


def _files(seed: bytes) -> Mapping[str, bytes]:
    if len(seed) != SEED:
        raise UsageError(
            f"the seed from which keys are made must have {SEED} bytes, and has {len(seed)}"
        )
    made: dict[str, bytes] = {}
    for secret, public in (BROKER, JOB):
        made[secret] = z85.encode(_derived(seed, secret))
        made[public] = zmq.curve_public(made[secret])
    made[TRANSFER[0]], made[TRANSFER[1]] = _certificate(_derived(seed, TRANSFER[0]))
    return made


def _derived(seed: bytes, name: str) -> bytes:
    """
    Derive 32 bytes from the secret `seed`, for the purpose `name`. Whoever knows the bytes for one
    purpose cannot compute the bytes for another purpose.
    """
    return hmac.digest(seed, f"tft {name}".encode(), "sha256")


def _certificate(seed: bytes) -> tuple[bytes, bytes]:
    """
    Return a private key and its self-signed certificate, both as PEM. The same seed always gives
    the same key and certificate.

    Raises `UsageError` when the package `cryptography` is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise UsageError(
            "making keys needs the package cryptography: pip install 'tft-bus[keys]', or make the "
            "keys on a machine that has the package, and copy them to this machine"
        ) from None
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a job of tft")])
    # The certificate never expires, so that no job ends because a date has passed. This is safe,
    # because each process accepts from others only the certificate in its own key directory.
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    private_key = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private_key, certificate.public_bytes(pem)


def _write(path: Path, content: bytes) -> None:
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(made, content)
    finally:
        os.close(made)


# ---------------------------------------------------------------- reading keys


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(
            f"--curve {directory}: there is no such directory; `tft keys {directory}` makes it, "
            "with the keys of a job"
        )
    if directory.stat().st_mode & _OTHERS_WRITE:
        raise UsageError(
            f"--curve {directory}: users other than the owner of this directory can write there, "
            f"and could replace the keys of the job: chmod go-w {directory}"
        )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise UsageError(
                    f"--curve: users other than the owner of {path} can access this file, and "
                    f"could take part in the job: chmod 600 {path}"
                )
            return file.read()
    except FileNotFoundError:
        raise UsageError(
            f"--curve: there is no {path}; copy the whole directory that `tft keys` has made"
        ) from None
    except OSError as refused:
        raise UsageError(f"--curve: {path} cannot be read: {refused.strerror}") from None


def _key(path: Path) -> bytes:
    key = _read(path).strip()
    try:
        if len(key) != _KEY or len(z85.decode(key)) != 32:
            raise ValueError
    except (ValueError, KeyError):
        raise UsageError(
            f"--curve: the file {path} contains no key; copy the whole directory that `tft keys` "
            "has made"
        ) from None
    return key


def _check_pair(directory: Path, names: tuple[str, str], secret: bytes, public: bytes) -> None:
    if zmq.curve_public(secret) != public:
        raise UsageError(
            f"--curve {directory}: {names[0]} and {names[1]} are not a pair; copy the whole "
            "directory that `tft keys` has made"
        )
