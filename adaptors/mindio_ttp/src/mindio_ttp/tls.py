"""
Converts MindIO's TLS settings, the argument `tls_info`, to options of tft.

tft encrypts messages with CURVE keys (of ZeroMQ) that all processes of a job share, and without
certificates. These keys are derived from the private key in `tls_info`, so all processes with the
same private key have them. The certificates in `tls_info` are only checked, as in MindIO.
"""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindio_ttp import logs
from mindio_ttp.certificate import Identity, private_key
from mindio_ttp.checks import Refused
from tft.errors import UsageError
from tft.spi import share_keys

log = logs.get_logger()

KEYS = (
    "tlsCert",
    "tlsCaPath",
    "tlsCaFile",
    "tlsCrlPath",
    "tlsCrlFile",
    "tlsPk",
    "tlsPkPwd",
    "packagePath",
)
"""The keys that `tls_info` may have. Other keys are ignored."""
NEEDED = ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsPk", "packagePath")
"""The keys that `tls_info` must have."""
LARGEST = 10 * 1024
"""The most characters that `tls_info` may have."""
LARGEST_FILE = 10 * 1024 * 1024
"""The largest number of bytes of a certificate or of a list of revoked certificates."""

Decrypt = Callable[[str], Any]
"""The function that the program has registered to decrypt passwords. Any: its result is checked
after the call."""


def read(info: Any) -> dict[str, str]:  # Any: not yet checked
    """
    Return the values in the argument `tls_info` by key. `info` is this argument.

    Raises `Refused` if `info` is not a text, is too long, or lacks a required key.
    """
    if not isinstance(info, str) or len(info) > LARGEST:
        raise Refused(f"tls_info must be a string of at most {LARGEST} characters")
    found: dict[str, str] = {}
    for pair in info.split(";"):
        name, colon, value = pair.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not value:
            if pair.strip():
                log.warning("tls_info_pair_skipped", pair=name)
            continue
        if name not in KEYS:
            log.warning("tls_info_key_unknown", key=name)
            continue
        found[name] = value
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise Refused(
            f"enable_tls is True, but tls_info lacks {', '.join(missing)}: tls_info is a string of "
            "pairs `key: value;` with these keys. Pass enable_tls=False if the network is trusted"
        )
    return found


def check_files(pairs: dict[str, str]) -> Identity:
    """
    Return the certificate files that `tls_info` names. Raises `Refused` for a file that is missing,
    a symbolic link or too large.
    """
    _directory("packagePath", _path(pairs["packagePath"]))
    return Identity(
        certificate=_file("tlsCert", _path(pairs["tlsCert"])),
        trusted=_files("tlsCaPath", "tlsCaFile", pairs),
        revoked=_files("tlsCrlPath", "tlsCrlFile", pairs) if "tlsCrlPath" in pairs else (),
    )


def password_of(pairs: dict[str, str], decrypt: Decrypt | None) -> str | None:
    """
    Return the password of the private key. Return None if `tls_info` has no password.

    If the program has registered a decrypt function, that function decrypts the password in
    `tls_info`. Raises `Refused` if the function fails or returns something else than a password.
    """
    cipher = pairs.get("tlsPkPwd")
    if cipher is None or decrypt is None:
        return cipher
    try:
        said = decrypt(cipher)
    except Exception as error:
        raise Refused(
            f"the decrypt function of the program has failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(said, str) or len(said) >= 2 * len(cipher):
        raise Refused(
            "the decrypt function of the program must return a string that is shorter than twice "
            "the length of tlsPkPwd"
        )
    return said


# Any: `info` is not yet checked
def options(info: Any, decrypt: Decrypt | None, ahead: int) -> tuple[str, ...]:
    """
    Return the options of `tft run` that encrypt the bus with keys derived from `info`.

    A warning is logged if the certificate expires within `ahead` days. Raises `Refused` for files
    or a private key that are not valid.
    """
    pairs = read(info)
    identity = check_files(pairs)
    key = private_key(pairs["tlsPk"], password_of(pairs, decrypt))
    days = identity.check(key)
    if days <= ahead:
        log.warning("certificate_expires", certificate=pairs["tlsCert"], days=days)
    seed = hmac.digest(b"tft mindio_ttp tlsPk", key.content, "sha256")
    # Derive the name of the directory from the private key, so that every start with this key uses
    # the same directory. The name does not reveal the key.
    name = hmac.digest(seed, b"directory", "sha256").hex()[:16]
    directory = Path.home() / ".tft" / f"keys-{name}"
    try:
        share_keys(directory, seed)
    except UsageError as refused:
        raise Refused(f"tls_info: {refused}") from refused
    return "--curve", str(directory)


def _path(value: str) -> Path:
    return Path("/" + value.lstrip("/"))


def _files(directory: str, names: str, pairs: dict[str, str]) -> tuple[Path, ...]:
    where = _path(pairs[directory])
    _directory(directory, where)
    listed = [name.strip() for name in pairs.get(names, "").split(",") if name.strip()]
    return tuple(_file(names, where / name) for name in listed)


def _directory(key: str, path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        raise Refused(f"{key} of tls_info: {path} must be a directory, and not a symbolic link")


def _file(key: str, path: Path) -> Path:
    if path.is_symlink() or not path.is_file():
        raise Refused(f"{key} of tls_info: {path} must be a file, and not a symbolic link")
    if path.stat().st_size > LARGEST_FILE:
        raise Refused(f"{key} of tls_info: {path} has more than {LARGEST_FILE} bytes")
    return path
