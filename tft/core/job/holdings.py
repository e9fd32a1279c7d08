"""
Own the facts that the controller knows about the state in the memory of a rank's process: its step,
and which copies of it are valid.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Holdings:
    """
    The copies of the training state that one process has reported, and the doubts about them.
    """

    held: int | None = None
    """The step of the complete state with which the process trains. None: the process is in the
    middle of an update, or new, and has no complete state."""
    backups: tuple[int, ...] = ()
    """The earlier steps of which the process keeps a copy."""
    digests: dict[str, dict[str, str]] | None = field(default_factory=dict)
    """The digests of the state of step `held`, by shard and part. Empty: the rank did not read its
    state, or could not read it. None: all ranks have loaded this state from one checkpoint, so a
    comparison is not needed."""
    line: str = ""
    """The line in the tail of step `held` at which the rank left its loop."""
    outrun: frozenset[str] = frozenset()
    """The shards of which other ranks have a more complete copy: those ranks came further in the
    tail of step `held`, though none to its end. This rank's copies of them do not count."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """By shard: the last step of which a copy of this rank counts. Copies of later steps differ from
    those of another rank, nobody knows which are right, and those of the other rank are used."""
    fetched: bool = False
    """True if the copy was fetched from other ranks in this incident. Then it does not prove that
    the copies of those ranks are right."""
    disputed: bool = False
    """True if another rank holds another copy of step `held` and it is not known which copy is
    right."""
    trusted: bool = True
    """True if no fault has touched the state in use."""
    damaged: bool = False
    """True if a fault has touched the memory of the process: the copies that it keeps are not
    trusted either."""
    doubted: int = -1
    """The copies of this step and of earlier steps that the process keeps may come from memory that
    was damaged and has been repaired since, or may be copies that were passed over."""
    searching: bool = False
    """True while the process loads a checkpoint. The state and the position of the process do not
    count until all ranks have loaded the same checkpoint."""

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
        Forget the results of earlier comparisons, because the process has new copies now.
        `fetched`: the new copies were fetched from other ranks.
        """
        self.outrun, self.passed_over = frozenset(), {}
        self.disputed, self.fetched = False, fetched

    def repaired(self, step: int, *, fetched: bool) -> None:
        """
        Record that the process now holds a sound copy of `step`, fetched from other ranks or loaded
        from a checkpoint. Earlier copies that it kept in damaged memory stay in doubt, and so do
        those that were passed over.
        """
        if self.damaged or self.passed_over:
            self.doubted = step
        self.trusted, self.damaged = True, False
        self.replaced(fetched=fetched)

    def reloaded(self, step: int) -> None:
        """
        Record that the process holds the state of the checkpoint of `step`, which all ranks have
        found. Its earlier copies may be of another run.
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
