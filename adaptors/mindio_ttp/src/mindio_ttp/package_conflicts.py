"""
Checks that no other installed distribution contains a Python package with the same name as a
package of the distribution tft-mindio, to which this module belongs.
"""

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

OURS = "tft-mindio"


def refuse_another(package: str, installed: Iterable[Distribution] | None = None) -> None:
    """
    Raise `ImportError` if a distribution other than tft-mindio also installs files of the Python
    package `package`. Python would then import a package that mixes files of the two distributions.

    `installed` are the installed distributions. If it is None, they are searched for.
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
    Return whether the distribution `found` installs files of the Python package `package`.

    The file list of the distribution is searched as text. Parsing the file lists of all
    distributions would cost each process 0.2 s.
    """
    files = found.read_text("RECORD") or found.read_text("SOURCES.txt") or ""
    tops = found.read_text("top_level.txt") or ""
    return f"\n{package}/" in f"\n{files}" or package in tops.split()
