"""
Checks that the installed TorchTitan has the version for which this adaptor was written.
"""

from importlib.metadata import PackageNotFoundError, version

from tft.errors import UsageError

KNOWN = "0.3"
"""The version of TorchTitan whose code this adaptor relies on: which methods its Trainer calls in
which order, and what its constructor makes. The next version may do this differently."""


def check_torchtitan() -> None:
    """
    Check that TorchTitan is installed in the version `KNOWN`. Raises `UsageError` if TorchTitan is
    missing or has another version.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise UsageError(
            "the adaptor for TorchTitan needs torchtitan, which is not installed: "
            "pip install 'tft-bus[torchtitan]'"
        ) from None
    if not found.startswith(f"{KNOWN}."):
        raise UsageError(
            f"the adaptor for TorchTitan was written for torchtitan {KNOWN}, but {found} is "
            "installed, whose Trainer may call its methods in another order. Install "
            f"'torchtitan>={KNOWN},<0.4'"
        )
