"""
The content of the simulated shards, and the truth about the right content, which no part of the
cluster can see.
"""

from typing import NamedTuple

Digests = dict[str, dict[str, str]]
"""Digests of the state that a rank holds, by shard and by part (`model` and `settings`)."""


class Content(NamedTuple):
    """
    The simulated content of one shard on one rank.
    """

    model: float
    """Stands for the parameters and the optimizer state. A whole number is the right content of
    a step. The fraction marks wrong content: `SPOILT` (1/4) comes from a polluted update,
    `FLIPPED` (1/8) from a silent corruption, and `WRONG` (1/2) is torn, corrupted or lost."""
    settings: float
    """Stands for the settings of the shard, such as the learning rate. A whole number, or one
    with the fraction `FLIPPED` (1/8) after a silent corruption."""
    flips: int = 0
    """The slices that silent corruptions have changed: bit n stands for slice n. In the other
    slices the content is as without the corruptions."""
    spread: int = 0
    """Not 0 if gradients of a rank with corrupted content were used. The number is the same on all
    ranks that have used the same gradients."""

    @property
    def flipped(self) -> bool:
        """
        True if a silent corruption has changed this content, or content from which it was copied or
        computed.
        """
        return self.model % 1 == FLIPPED or self.settings % 1 == FLIPPED

    @property
    def spoilt(self) -> bool:
        """
        True if the content comes from a polluted update (an update with wrong numbers from a rank).
        """
        return self.model % 1 == SPOILT

    @property
    def wrong(self) -> bool:
        """
        True if the content is torn, corrupted with an exception, or lost.
        """
        return self.model % 1 == WRONG

    def digests(self) -> dict[str, str]:
        """
        Return the digests of both parts (`model` and `settings`), as a rank reports them.
        """
        model = f"{self.model!r} spread {self.spread}" if self.spread else repr(self.model)
        return {"model": model, "settings": repr(self.settings)}

    def plain(self) -> "Content":
        """
        Return this content as it would be if no wrong gradients had been used.
        """
        return self._replace(spread=0) if self.spread else self

    def used(self, gradients: int) -> "Content":
        """
        Return this content after an update with the wrong gradients `gradients`. If `gradients` is
        0, the gradients were right, and the content stays as it is.
        """
        return self._replace(spread=hash((self.spread, gradients)) or 1) if gradients else self


SPOILT, FLIPPED, WRONG = 0.25, 0.125, 0.5
RANGE = 1 << 40
"""Numbers below this bound can be stored with a fraction of 1/8 without rounding."""


Written = Content | float
"""The content of a simulated file: a shard, or the data position of a rank (the number of batches
drawn)."""


class Truth:
    """
    The right content of every shard, and the right data position of every rank, at the end of each
    step of the undisturbed run. Decisions of the job change the truth: batches left out, and steps
    trained with fewer ranks. Content that no part of the cluster can recognize as wrong becomes the
    truth, and so does content that is reported as inexact.

    In the tail of a step a shard has three contents, one after another. After the update window,
    its settings are still those of the step before. Then the shard has its new settings. At the
    end of the step the shard is complete.
    """

    def __init__(self, seed: int, *, tails: bool = False) -> None:
        self._values = [hash((seed, 0))]
        self._tails = tails
        self._bends: dict[str, dict[int, Content]] = {}
        """By shard and step: the content that counts as right, because all ranks continued from it.
        """
        self._data = [0]
        self._left_out: dict[int, int] = {}
        self._without: dict[int, tuple[int, ...]] = {0: ()}
        self._wrong = 0

    def value(self, step: int, shard: str) -> Content:
        """
        Return the right content of a shard at the end of `step`.
        """
        self._until(step)
        bends = self._bends.get(shard)
        since = max((at for at in bends if at <= step), default=None) if bends else None
        if bends is None or since is None:
            return Content(self._values[step], step)
        content = bends[since]
        for at in range(since + 1, step + 1):
            content = self._next(content, at)
        return content

    def stages(self, step: int, shard: str) -> tuple[Content, ...]:
        """
        Return the contents of a shard from the end of the update window of `step` to the end of the
        step, in order. Without tails, return only the content at the end of the step.
        """
        end = self.value(step, shard)
        if not self._tails:
            return (end,)
        model = hash((end.model, 1))
        return Content(model, end.settings - 1), Content(model, end.settings), end

    def bend(self, step: int, shard: str, content: Content) -> None:
        """
        Make `content` the right content of a shard at the end of `step`, because all ranks continue
        with it.
        """
        self._bends.setdefault(shard, {})[step] = content

    def _next(self, content: Content, step: int) -> Content:
        """
        Return the content that `content` becomes through the update and the tail of `step`.
        """
        facts = (content.model, self._data[step], self._without_after(step - 1))
        return Content(hash(facts), content.settings + 1)

    def data(self, step: int) -> int:
        """
        Return the number of batches that each rank has drawn by the end of `step`.
        """
        self._until(step)
        return self._data[step]

    def begin(self, step: int) -> int:
        """
        Return the number of batches that each rank has drawn or left out when the step after `step`
        begins.
        """
        return self.data(step) + self._left_out.get(step, 0)

    def leave_out(self, step: int, batches: int) -> None:
        """
        Record the decision that the job continues from the end of `step` and leaves out the next
        `batches` batches.
        """
        if batches != self._left_out.get(step, 0) or any(at > step for at in self._left_out):
            self._forget_after(step)
        self._left_out = {at: n for at, n in self._left_out.items() if at < step}
        if batches:
            self._left_out[step] = batches

    def go_on_without(self, step: int, ranks: tuple[int, ...]) -> None:
        """
        Record the decision that the job continues from the end of `step` without `ranks`.
        """
        before = {at: who for at, who in self._without.items() if at <= step}
        if before[max(before)] != ranks or len(before) != len(self._without):
            self._forget_after(step)
            self._without = {**before, step: ranks}

    def wrong(self) -> Content:
        """
        Return content that is equal to no other content.
        """
        self._wrong += 1
        return Content(self._wrong + WRONG, 0)

    def spoilt(self, step: int) -> Content:
        """
        Return the content that all ranks have after the polluted update (with wrong numbers) of
        `step`.
        """
        self._wrong += 1
        return Content(step + SPOILT, step)

    def flipped(self, content: Content, *, settings: bool, number: int = 0) -> Content:
        """
        Return `content` after a silent corruption of slice `number`: of its settings when
        `settings` is True, otherwise of its model.
        """
        self._wrong += 1
        flips = content.flips | 1 << number
        if settings:
            return content._replace(settings=self._wrong * 100 + FLIPPED, flips=flips)
        return content._replace(model=self._wrong + FLIPPED, flips=flips)

    def slice_of(self, content: Content, shard: str, step: int, number: int) -> Content:
        """
        Return what slice `number` shows of the content of a shard at the end of `step`. Corrupted
        content looks right in the slices that are not corrupted.
        """
        if not content.flipped or content.flips >> number & 1:
            return content
        return self.value(step, shard)._replace(spread=content.spread)

    def goes_on(self, content: Content, before: Content, after: Content, step: int) -> Content:
        """
        Return the next content of a rank that holds `content`. The right content changes from
        `before` to `after` in `step`. A rank with the right content gets `after`; wrong content
        stays wrong.
        """
        if content == before:
            return after
        if not content.flipped:
            if content.plain() == before:
                return after._replace(spread=content.spread)
            return content if content.spoilt else self.wrong()
        model = content.model
        if after.model != before.model:
            model = hash((content, step)) % RANGE + FLIPPED
        return content._replace(
            model=model, settings=content.settings + after.settings - before.settings
        )

    def _forget_after(self, step: int) -> None:
        del self._values[step + 1 :], self._data[step + 1 :]

    def unbend_after(self, step: int) -> None:
        """
        Forget the contents that `bend` made right for steps later than `step`, because all ranks go
        back to `step`.
        """
        for bends in self._bends.values():
            for later in [at for at in bends if at > step]:
                del bends[later]

    def _without_after(self, last: int) -> tuple[int, ...]:
        """
        Return the ranks without which the job trains after the end of step `last`.
        """
        return self._without[max(at for at in self._without if at <= last)]

    def _until(self, step: int) -> None:
        while len(self._values) <= step:
            last = len(self._values) - 1
            self._data.append(self.begin(last) + 1)
            facts = (self._values[last], self._data[-1], self._without_after(last))
            self._values.append(hash(facts))
