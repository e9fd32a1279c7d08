"""
Checks that the installed Lightning has a version for which this adaptor was written.
"""

from importlib import metadata

from tft.errors import UsageError

KNOWN = "2.6"
"""The version of Lightning whose loops this adaptor drives. The loops and their counters are private
parts of Lightning, and may differ in the next version."""


def check_lightning() -> None:
    """
    Check that the package `lightning` is installed in the version `KNOWN`. Raises `UsageError` if
    it is missing or has another version.
    """
    try:
        version = metadata.version("lightning")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "tft_lightning needs the package lightning, which is not installed: "
            "pip install 'tft-bus[lightning]'"
        ) from None
    if not version.startswith(f"{KNOWN}."):
        raise UsageError(
            f"tft_lightning was written for Lightning {KNOWN}, but {version} is installed, whose "
            f"training loops may differ: pip install 'lightning>={KNOWN},<2.7'"
        )
