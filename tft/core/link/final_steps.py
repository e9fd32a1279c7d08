"""
Find out which steps are final: all ranks that take part have ended them, so that no recovery from
copies in memory goes back before them.
"""

from collections.abc import Collection

from tft.protocol.messages import Beat

LOOK = 0.1
"""The least time in seconds between two checks of the positions of all ranks. A check takes longer
the more ranks the job has, so it is not made for every heartbeat."""


class FinalSteps:
    """
    Follows the last final step of a job by the positions of the ranks in heartbeats (`Beat`).

    A step is final when every member has ended it, including its tail and the functions that are
    called after the step. Then each rank has the state of the end of this step, or of a later step.
    The job goes back further only if it returns to a checkpoint, or to a copy in host memory
    (`--backup-every`).
    """

    def __init__(self) -> None:
        self._members: frozenset[int] = frozenset()
        self._ended: dict[int, int] = {}
        self._last: int | None = None
        self._next = 0.0

    def resumed(self, members: Collection[int], step: int | None) -> int | None:
        """
        Record that `members` train on from the end of `step`. If `step` is None, they go on from
        where they are, as after a pause.

        Return `step` if it becomes the last final step, because the job begins at this step or goes
        back to before the last final step. Otherwise return None.
        """
        self._members, self._ended = frozenset(members), {}
        if step is None or (self._last is not None and step >= self._last):
            return None
        self._last = step
        return step

    def heard(self, beat: Beat, at: float) -> int | None:
        """
        Record the positions in the heartbeat of a node that has arrived at the time `at` (in
        seconds). If a check of all ranks is due and has found a later final step than before,
        return this step. Otherwise return None.
        """
        for pulse in beat.pulses:
            if pulse.rank in self._members:
                position = pulse.position
                self._ended[pulse.rank] = position.step - (position.tail or position.after)
        if at < self._next or not self._members or len(self._ended) < len(self._members):
            return None
        self._next = at + LOOK
        return self._raised(min(self._ended.values()))

    def over(self, step: int) -> int | None:
        """
        Record that the job is over. `step` is the last step of a completed job, or otherwise the
        step of the newest checkpoint. Return `step` if it is later than the last final step,
        otherwise None.
        """
        return self._raised(step)

    def _raised(self, step: int) -> int | None:
        if self._last is not None and step <= self._last:
            return None
        self._last = step
        return step
