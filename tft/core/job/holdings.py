"""
Define what the controller knows about the training state in the memory of a rank's process: the
step of the state, which earlier copies the process keeps, and which copies may be wrong.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Holdings:
    """
    The copies of the training state in a rank's process, as the process has reported them. Also
    which of these copies may be wrong.
    """

    held: int | None = None
    """The step at whose end the process had the complete training state with which it trains. None:
    the process is new or in the middle of an update, so it has no complete state."""
    backups: tuple[int, ...] = ()
    """The earlier steps of which the process keeps a copy of the training state."""
    digests: dict[str, dict[str, str]] | None = field(default_factory=dict)
    """By shard, then by part of the shard: the digests of the state of step `held`. Empty: the rank
    has not digested its state, or could not read it. None: all ranks have loaded the state from the
    same checkpoint, so it need not be compared."""
    line: str = ""
    """The line at which the rank left its loop in the tail of step `held` (the code between the
    update and the end of the step)."""
    outrun: frozenset[str] = frozenset()
    """The shards for which this rank's copy is not used, because other ranks have a more complete
    copy. Those ranks came further in the tail of step `held` (the code after the update), though
    not to its end."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """By shard: the last step of which this rank's copy may be used. Later copies of this rank
    differ from the copies of another rank, and it is not known which are right. The job has decided
    to use the copies of the other rank."""
    fetched: bool = False
    """True if the process has fetched its state from other ranks in this incident. A fetched copy
    repeats the copy of its source, so the fetched copy does not prove that the source is right."""
    disputed: bool = False
    """True if another rank holds a different copy of the state of step `held`, and it is not known
    which of the two copies is right."""
    trusted: bool = True
    """True if the state with which the process trains may be used. False: this state may be wrong
    because of a fault."""
    damaged: bool = False
    """True if a fault may have damaged the memory of the process, so that the earlier copies in
    this memory are not trusted either."""
    doubted: int = -1
    """A step number: copies of this step and of earlier steps are not used, although the process
    keeps them. These copies were in memory when the memory was damaged, or the copies of another
    rank were preferred, or the copies may be of another run of the job. -1: there is no such limit.
    """
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
        True if the state with which the process trains may be used, as far as the controller knows.
        """
        return self.trusted and not (self.searching or self.disputed)

    def replaced(self, *, fetched: bool = False) -> None:
        """
        Forget the results of earlier comparisons of copies, because the process has a new state
        now. `fetched` is True if the process has fetched this state from other ranks.
        """
        self.outrun, self.passed_over = frozenset(), {}
        self.disputed, self.fetched = False, fetched

    def repaired(self, step: int, *, fetched: bool) -> None:
        """
        Record that the process now holds a right state of `step`, which it has fetched from other
        ranks (`fetched` is True) or loaded from a checkpoint. If its earlier copies were in damaged
        memory, or the copies of another rank were preferred to them, they are still not used.
        """
        if self.damaged or self.passed_over:
            self.doubted = step
        self.trusted, self.damaged = True, False
        self.replaced(fetched=fetched)

    def reloaded(self, step: int) -> None:
        """
        Record that the process holds the state of the checkpoint of `step`, which each rank has
        found and loaded by itself. Do not use the earlier copies that the process keeps, because
        they may be of another run of the job.
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
        Record that the process holds no copy of the training state any more.
        """
        self.held, self.backups = None, ()
