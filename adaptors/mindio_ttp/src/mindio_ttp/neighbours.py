"""
Whether somebody else's package lies where one of ours does.
"""

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

OURS = "tft-mindio"


def refuse_another(package: str, installed: Iterable[Distribution] | None = None) -> None:
    """
    Raises `ImportError` where another distribution brings files of a package: half of it would be
    ours, half theirs.
    """
    for found in distributions() if installed is None else installed:
        name = found.metadata["Name"] or ""
        if name.lower().replace("_", "-") == OURS:
            continue
        if any(file.parts[:1] == (package,) for file in found.files or ()):
            raise ImportError(
                f"{name} {found.version} brings a package {package}, too, and {OURS} does not stand "
                f"beside it: uninstall one of them (`pip uninstall {name}`, then install {OURS} again)"
            )
