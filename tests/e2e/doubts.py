"""
A recovery plugin that trusts no copy after a step, so that all ranks go back.
"""

from pathlib import Path

from tests.agent.stage import package

DOUBTS = """
from tft.spi import Advice, hookimpl

LIMITS = {limits}

@hookimpl
def tft_advise(incident):
    found = LIMITS.get(incident.number)
    if found is not None:
        base, step = found
        return Advice(strategy="go back", base=base, not_after=step, why="a validation says so")
"""


def doubts(tmp_path: Path, limits: dict[int, tuple[str, int]]) -> dict[str, str]:
    """
    Install a recovery plugin, and return the environment in which a job finds it. `limits` has, by
    incident, the strategy and the step after which the plugin trusts no copy.
    """
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "doubts", DOUBTS.format(limits=limits), "tft.plugins")
    return {"PYTHONPATH": str(tmp_path / "packages")}
