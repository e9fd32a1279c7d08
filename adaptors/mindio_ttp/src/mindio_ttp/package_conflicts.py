"""
Checks that no other installed distribution has a package with the same name as a package of this
distribution.
"""

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

OURS = "tft-mindio"


def refuse_another(package: str, installed: Iterable[Distribution] | None = None) -> None:
    """
    Raise `ImportError` if another distribution than tft-mindio installs files of `package`.
    Otherwise Python would import a package with files of both distributions.
    """
    for found in distributions() if installed is None else installed:
        name = found.metadata["Name"] or ""
        if name.lower().replace("_", "-") == OURS:
            continue
        if _brings(found, package):
            raise ImportError(
                f"{name} {found.version} also has a package {package}, so it cannot be installed "
                f"together with {OURS}: uninstall one of them (`pip uninstall {name}`, then "
                f"install {OURS} again)"
            )


def _brings(found: Distribution, package: str) -> bool:
    """
    Return whether the distribution `found` installs files of a package.

    The file list of the distribution is searched as text, because parsing the lists of all
    distributions would cost each process 0.2 s.
    """
    files = found.read_text("RECORD") or found.read_text("SOURCES.txt") or ""
    tops = found.read_text("top_level.txt") or ""
    return f"\n{package}/" in f"\n{files}" or package in tops.split()
