"""
`tls_info`: what MindIO makes TLS of, and what becomes of it here.

The bus is encrypted by CURVE, which knows keys and no certificates. What `tls_info` says is checked as
MindIO checks it.
"""

from pathlib import Path
from typing import Any

import structlog

from mindio_ttp.checks import Refused

log = structlog.get_logger()

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
NEEDED = ("tlsCert", "tlsCaPath", "tlsCaFile", "tlsPk", "packagePath")
LARGEST = 10 * 1024
"""Characters of a `tls_info`."""


def read(info: Any) -> dict[str, str]:  # Any: as given
    """
    The pairs of a `tls_info`. Raises `Refused` for what is no text or too long, or lacks what is needed.
    """
    if not isinstance(info, str) or len(info) > LARGEST:
        raise Refused(f"tls_info is to be a text of at most {LARGEST} characters")
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
            f"enable_tls is True, and tls_info lacks {', '.join(missing)}: it is a text of pairs "
            "`key: value;` with these keys. Pass enable_tls=False where the network is trusted"
        )
    return found


def check_files(pairs: dict[str, str]) -> None:
    """
    Raises `Refused` where a file that is named is not there, or is a link.
    """
    certificates = Path("/" + pairs["tlsCaPath"].lstrip("/"))
    _directory("tlsCaPath", certificates)
    _directory("packagePath", Path("/" + pairs["packagePath"].lstrip("/")))
    _file("tlsCert", Path("/" + pairs["tlsCert"].lstrip("/")))
    for name in pairs["tlsCaFile"].split(","):
        _file("tlsCaFile", certificates / name.strip())
    if "tlsCrlPath" in pairs:
        _directory("tlsCrlPath", Path("/" + pairs["tlsCrlPath"].lstrip("/")))


def _directory(key: str, path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        raise Refused(f"{key} of tls_info: {path} is no directory, or a link to one")


def _file(key: str, path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise Refused(f"{key} of tls_info: {path} is no file, or a link to one")


def options(info: Any) -> tuple[str, ...]:  # Any: as given
    """
    The options of `tft run` for an encrypted bus.
    """
    check_files(read(info))
    raise Refused(
        "enable_tls is True, and this version of tft does not encrypt its bus: pass enable_tls=False "
        "where the network is trusted"
    )
