"""
The curves of a run: its steps over time, and the time of a step.
"""

from tft.report.progress import RunProgress, Sample

MOST = 2000
"""The maximum number of points of a curve: about the width of a screen in pixels. When a curve has
more points, every second point is removed."""

Point = tuple[float, int, float | None]
"""Seconds since the run began, the step, and the mean seconds for a step since the point before.
The last value is None for the first point. It is also None if since the point before the job has
changed its state (such as from training to repair), or has returned to an earlier step."""


class Curve:
    """
    The points of one run, as far as the file of its progress was read.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.version = 0
        """This number changes when earlier points were removed. If it stays the same, points were
        only appended."""
        self._stride = 1
        self._taken = self._changes = 0
        self._last: Sample | None = None

    def take(self, run: RunProgress) -> None:
        """
        Add the samples of `run` that were not added before. Each call must get the same run.
        """
        while self._taken < len(run.samples):
            sample = run.samples[self._taken]
            self._taken += 1
            moved = self._changes
            while self._changes < len(run.changes) and run.changes[self._changes].at <= sample.at:
                self._changes += 1
            before = self._last if moved == self._changes else None
            if before is not None and self._taken % self._stride and sample.step > before.step:
                continue
            self._last = sample
            seconds = None
            if before is not None and sample.step > before.step:
                seconds = (sample.at - before.at) / (sample.step - before.step)
            self.points.append((round(sample.at - run.opened, 3), sample.step, _short(seconds)))
        while len(self.points) > MOST:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        self.version += 1
        # keep the points where the job did not train (their step time is None), unless most points
        # are such points
        kept = [p for place, p in enumerate(self.points) if p[2] is None or place % 2]
        self.points = kept if len(kept) < 0.75 * len(self.points) else self.points[::2]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
