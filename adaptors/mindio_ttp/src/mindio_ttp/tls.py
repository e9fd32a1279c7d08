"""
Converts the TLS settings of the library MindIO to options of the command `tft run`. A program
passes these settings as a text, in the argument `tls_info`.

tft does not use certificates for encryption. It encrypts messages with CURVE keys (keys of ZeroMQ)
that all processes of a job share. The CURVE keys are derived from the private key in `tls_info`, so
all processes with the same private key derive the same CURVE keys. The certificates that `tls_info`
names are only checked, as in MindIO.
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
"""The names of the settings that `tls_info`, a text of pairs `name: value;`, may contain. Settings
with other names are ignored."""
NEEDED = ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsPk", "packagePath")
"""The names of the settings that `tls_info` must contain."""
LARGEST = 10 * 1024
"""The largest number of characters that `tls_info` may have."""
LARGEST_FILE = 10 * 1024 * 1024
"""The largest number of bytes that the file of a certificate, or of a list of revoked certificates,
may have."""

Decrypt = Callable[[str], Any]
"""The type of the function that the program has registered to decrypt passwords. Any: the result of
the function is checked after the call."""


def read(info: Any) -> dict[str, str]:  # Any: not checked yet
    """
    Return the settings in `info`, the argument `tls_info` of a function of MindIO. The result maps
    the name of a setting to its value.

    Raises `Refused` if `info` is not a text, is too long, or lacks a required setting.
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
    Return the certificate files that the settings `pairs` from `tls_info` name. Raises `Refused`
    for a file that is missing, is a symbolic link or is too large.
    """
    _directory("packagePath", _path(pairs["packagePath"]))
    return Identity(
        certificate=_file("tlsCert", _path(pairs["tlsCert"])),
        trusted=_files("tlsCaPath", "tlsCaFile", pairs),
        revoked=_files("tlsCrlPath", "tlsCrlFile", pairs) if "tlsCrlPath" in pairs else (),
    )


def password_of(pairs: dict[str, str], decrypt: Decrypt | None) -> str | None:
    """
    Return the password of the private key. `pairs` are the settings from `tls_info`. Return None if
    they contain no password.

    `decrypt` is the function that the program has registered to decrypt the password. If it is
    None, the password is not encrypted. Raises `Refused` if the function fails, or returns anything
    but a text of a plausible length.
    """
    cipher = pairs.get("tlsPkPwd")
    if cipher is None or decrypt is None:
        return cipher
    try:
        said = decrypt(cipher)
    except Exception as error:
        raise Refused(
            "the decrypt function of the training script (for tlsPkPwd of tls_info) has failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(said, str) or len(said) >= 2 * len(cipher):
        raise Refused(
            "the decrypt function of the training script must return the password as a string that "
            "is shorter than twice the length of tlsPkPwd"
        )
    return said


# Any: `info` is not yet checked
def options(info: Any, decrypt: Decrypt | None, ahead: int) -> tuple[str, ...]:
    """
    Return the options of the command `tft run` that encrypt the bus with keys derived from the
    private key in `info`. `info` is the argument `tls_info` of a function of MindIO.

    `decrypt` is the program's function that decrypts the password of the private key, or None. A
    warning is logged if the certificate expires within `ahead` days. Raises `Refused` if a
    certificate file or the private key is not valid.
    """
    pairs = read(info)
    identity = check_files(pairs)
    key = private_key(pairs["tlsPk"], password_of(pairs, decrypt))
    days = identity.check(key)
    if days <= ahead:
        log.warning("certificate_expires", certificate=pairs["tlsCert"], days=days)
    seed = hmac.digest(b"tft mindio_ttp tlsPk", key.content, "sha256")
    # Derive the name of the directory for the keys of the bus from the private key. So every start
    # with this private key uses the same directory. The name does not reveal the private key.
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
