"""
The part of a session that a plugin sees, without a job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class View:
    """
    A session whose facts the test sets. It has no state that could be digested.
    """

    rank: int = 0
    incarnation: int = 0
    world: int = 3
    run_dir: Path = Path()
    step: int = 1
    evaluating: bool = False
    incarnations: Mapping[int, int] = field(default_factory=dict)

    def compare_slices(self, of: int) -> None:
        """
        Compare nothing.
        """

    def digest_slice(self, number: int) -> Callable[[], None] | None:
        """
        Digest nothing.
        """
        return None

    def measure_work(self) -> None:
        """
        Measure nothing.
        """
