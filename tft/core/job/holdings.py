"""
Own the facts that the controller knows about the state in the memory of a rank's process: its step,
and which copies of it are valid.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Holdings:
    """
    The copies of the training state that one process has reported, and which of them may be wrong.
    """

    held: int | None = None
    """The step of the complete state with which the process trains. None: the process is in the
    middle of an update, or new, and has no complete state."""
    backups: tuple[int, ...] = ()
    """The earlier steps of which the process keeps a copy."""
    digests: dict[str, dict[str, str]] | None = field(default_factory=dict)
    """By shard and part: the digests of the state of step `held`. Empty: the rank has not read its
    state, or could not read it. None: all ranks have loaded the state from the same checkpoint, so
    it need not be compared."""
    line: str = ""
    """The line at which the rank left its loop in the tail of step `held` (the code between the
    update and the end of the step)."""
    outrun: frozenset[str] = frozenset()
    """The shards of which other ranks have a more complete copy, because those ranks came further
    in the tail of step `held`, though not to its end. This rank's copies of them are not used."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """By shard: the last step of which this rank's copy may be used. Later copies differ from those
    of another rank. It is not known which are right, and those of the other rank are used."""
    fetched: bool = False
    """True if the state was fetched from other ranks in this incident. Then the fact that it is
    equal to the copies of those ranks does not prove that they are right."""
    disputed: bool = False
    """True if another rank holds a different copy of step `held` and it is not known which copy is
    right."""
    trusted: bool = True
    """True if no fault has touched the state with which the process trains."""
    damaged: bool = False
    """True if a fault has touched the memory of the process, so that its earlier copies are not
    trusted either."""
    doubted: int = -1
    """Earlier copies up to this step are not used. They were in memory when it was damaged, or they
    were passed over, or they may be of another run."""
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
        True if nothing is known against the state with which the process trains.
        """
        return self.trusted and not (self.searching or self.disputed)

    def replaced(self, *, fetched: bool = False) -> None:
        """
        Forget the results of earlier comparisons, because the process has a new state now.
        `fetched` is True if it has fetched this state from other ranks.
        """
        self.outrun, self.passed_over = frozenset(), {}
        self.disputed, self.fetched = False, fetched

    def repaired(self, step: int, *, fetched: bool) -> None:
        """
        Record that the process now holds a sound state of `step`, which it has fetched from other
        ranks (`fetched` is True) or loaded from a checkpoint. Earlier copies in damaged memory are
        still not used, and neither are copies that were passed over.
        """
        if self.damaged or self.passed_over:
            self.doubted = step
        self.trusted, self.damaged = True, False
        self.replaced(fetched=fetched)

    def reloaded(self, step: int) -> None:
        """
        Record that the process holds the state of the checkpoint of `step`, which all ranks have
        found and loaded. Do not use its earlier copies, because they may be of another run.
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
