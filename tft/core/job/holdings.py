"""
Own the facts that the controller knows of the state in the memory of a rank's process: its step,
and which copies of it are valid.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Holdings:
    """
    The copies that one process has reported to hold, and the doubts about them.
    """

    held: int | None = None
    """The step whose whole state the process has in use. None while the state is torn or new."""
    backups: tuple[int, ...] = ()
    """Earlier steps of which the process keeps a copy."""
    digests: dict[str, dict[str, str]] | None = field(default_factory=dict)
    """Digests of the state of step `held`, by shard and part. Empty: the rank has not read its
    state, or could not. None: the state comes from a checkpoint that all ranks have loaded."""
    line: str = ""
    """The line in the tail of step `held` at which the rank has left the loop."""
    outrun: frozenset[str] = frozenset()
    """The shards of which the copy of this rank does not count. Other ranks have come further in
    the tail of step `held`, though none to its end: their copies count."""
    fetched: bool = False
    """True if the copy was fetched from other ranks in this incident. It is then no evidence for
    the copies of those ranks."""
    disputed: bool = False
    """True if another rank holds another copy of step `held` and it is not known which copy is
    right."""
    trusted: bool = True
    """True if no fault has touched the state in use."""
    damaged: bool = False
    """True if a fault has touched the memory of the process: the copies that it keeps are not
    trusted either."""
    doubted: int = -1
    """Kept copies of this step and of earlier steps may be from before the memory of the process
    was repaired."""
    searching: bool = False
    """True while the process loads a checkpoint, a known one or one that it finds itself. Its state
    and its position do not count for the job until all ranks have loaded the same checkpoint."""

    @property
    def kept(self) -> tuple[int, ...]:
        """
        The earlier steps of which the process keeps a copy that is not known to be wrong.
        """
        if self.damaged or self.searching:
            return ()
        return tuple(step for step in self.backups if step > self.doubted)

    @property
    def sound(self) -> bool:
        """
        True if there is no doubt about the state in use.
        """
        return self.trusted and not (self.searching or self.disputed)

    def replaced(self, *, fetched: bool = False) -> None:
        """
        Drop the results of comparisons with earlier copies: the process has other copies now.
        `fetched` is True if it has fetched them from other ranks.
        """
        self.outrun = frozenset()
        self.disputed, self.fetched = False, fetched

    def repaired(self, step: int, *, fetched: bool) -> None:
        """
        Note that the process holds a sound copy of `step` now, fetched from other ranks or loaded
        from a checkpoint. Copies that it kept in damaged memory stay doubtful.
        """
        if self.damaged:
            self.doubted = step
        self.trusted, self.damaged = True, False
        self.replaced(fetched=fetched)

    def reloaded(self, step: int) -> None:
        """
        Note that the process holds the checkpoint of `step` which all ranks have found. The copies
        that it kept may be of another run.
        """
        self.trusted, self.damaged, self.doubted = True, False, step
        self.replaced()

    def distrust(self) -> None:
        """
        Record that no copy of this process may be used.
        """
        self.trusted, self.damaged = False, True

    def lost(self) -> None:
        """
        Record that the process holds no copy any more.
        """
        self.held, self.backups = None, ()
