"""
Whether somebody else's `mindio_ttp` lies where ours does.
"""

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

PACKAGE = "mindio_ttp"
OURS = "tft-mindio"


def refuse_another(installed: Iterable[Distribution] | None = None) -> None:
    """
    Raises `ImportError` where another distribution brings files of this package: half of it would be
    ours, half theirs.
    """
    for found in distributions() if installed is None else installed:
        name = found.metadata["Name"] or ""
        if name.lower().replace("_", "-") == OURS:
            continue
        if any(file.parts[:1] == (PACKAGE,) for file in found.files or ()):
            raise ImportError(
                f"{name} {found.version} brings a package {PACKAGE}, too, and {OURS} does not stand "
                f"beside it: uninstall one of them (`pip uninstall {name}`, then install {OURS} again)"
            )
