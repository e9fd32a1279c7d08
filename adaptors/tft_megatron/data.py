"""
The data position of Megatron scripts: the number of samples that the whole job has consumed.

After a rollback, new iterators over the data begin at this position. Megatron's calculator of the
number of micro-batches is set to this position too. No other data position is stored.

An undisturbed job makes its iterators once, and a job with a fault makes them again. In both jobs
training must draw the same random numbers. So what is drawn while iterators are made is undone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from itertools import islice
from typing import Any

import torch
from tft_pytorch.generators import generators, packed, restore

from tft.errors import MalformedMessage, UsageError

Batches = Iterator[Any] | Sequence[Iterator[Any] | None] | None
"""The result of the script's function `build`: an iterator over the micro-batches of this rank. If
the rank has several chunks of the model (virtual pipeline stages), the result is a sequence with
one iterator for each chunk. None means that the rank reads no data. (`Any`: micro-batches may be of
any type.)"""


class Data:
    """
    The object to pass as `enable(data=...)`. Call its method `begin(step)` at the beginning of each
    step. The method returns the `data_iterator` for Megatron's schedules:

        data = Data(lambda consumed: iter(loader_of_this_rank(consumed)))
        for step in session.steps(1000):
            forward_backward(
                data_iterator=data.begin(step), num_microbatches=get_num_microbatches(), ...
            )

    When a step begins, the data position grows by the global batch size of that step, also on ranks
    that read no data. So whenever tft captures the position during a step, it captures the position
    at the end of this step.
    """

    def __init__(
        self, build: Callable[[int], Batches], *, consumed: int = 0, chunks: int | None = None
    ) -> None:
        """
        Store the function `build`, which makes the iterator of this rank.

        `build(consumed)` returns an iterator over the micro-batches that follow after `consumed`
        samples. `build` is called when training begins, and again when the first step after a
        rollback begins. For the same `consumed`, `build` must return the same micro-batches, so
        they must not depend on the random generators of the process. What `build` draws from these
        generators is undone when it has returned. If it returns the iterator of a generator
        function, what is drawn for the first micro-batch is undone, too.

        `consumed` is the position at which training begins. `chunks` is Megatron's virtual pipeline
        size, if the script uses it; `build` then returns that many iterators.

        Megatron's calculator must exist: call `init_num_microbatches_calculator` first. Raises
        `UsageError` if it does not exist.
        """
        _calculator()
        self._build = build
        self._consumed = consumed
        self._step: int | None = None
        """The newest step that has begun. None if no step has begun since the data position was
        set."""
        self._drawn = _Drawn(1 if chunks is None else chunks)
        self._several = chunks is not None

    @property
    def consumed(self) -> int:
        """
        Return the number of samples that the whole job has consumed, including the samples of the
        present step.
        """
        return self._consumed

    @property
    def iterators(self) -> "_Chunk | list[_Chunk]":
        """
        Return the iterators that `begin` returns. These objects stay the same for the whole
        training, so a training loop of Megatron, which asks for its iterators once, can keep them.
        """
        return self._drawn.chunks if self._several else self._drawn.chunks[0]

    def begin(self, step: int) -> "_Chunk | list[_Chunk]":
        """
        Begin a step and return the iterators of this rank. Also set Megatron's number of
        micro-batches to the number that belongs to the present data position.

        This method may be called more than once in a step, for example by a forward-step function.
        Raises `UsageError` if the previous step has drawn some of its micro-batches, but not all.
        """
        if step != self._step:
            if self._step is None:
                with _undisturbed():
                    made = self._made()
                self._drawn.begin_at([_begun_later(each, self._consumed) for each in made])
            else:
                self._drawn.check(self._step)
            self._step = step
            self._move()
            self._drawn.expect(_calculator().get())
        return self.iterators

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` global batches. A global batch is what all ranks together train
        in one step.
        """
        for _ in range(batches):
            self._move()
        self._set(self._consumed)

    def state_dict(self) -> dict[str, int]:
        """
        Return the number of samples that were consumed.
        """
        return {"consumed": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the number of consumed samples to the number in `state`. The next step begins with new
        iterators.

        Raises `MalformedMessage` if `state` was captured from another kind of object.
        """
        if "consumed" not in state:
            raise MalformedMessage(
                f"the saved data position contains {', '.join(state) or 'nothing'}, but "
                "tft_megatron's Data expects `consumed`, the number of samples: the position was "
                "saved by an object of another class"
            )
        self._set(state["consumed"])

    def _set(self, consumed: int) -> None:
        self._consumed, self._step = consumed, None
        self._drawn.let_go()
        # Set Megatron's calculator of micro-batches now, because tft reads the increment for the
        # scheduler from the calculator before the next step begins.
        _calculator().update(consumed, consistency_check=False)

    def _move(self) -> None:
        present = _calculator()
        present.update(self._consumed, consistency_check=True)
        self._consumed += present.get_current_running_global_batch_size()

    def _made(self) -> list[Iterator[Any] | None]:
        made = self._build(self._consumed)
        if not self._several:
            if isinstance(made, Sequence):
                raise UsageError(
                    f"the function build that was given to Data has returned {len(made)} "
                    f"iterators, but one is expected; if a rank has {len(made)} chunks of the "
                    f"model, write Data(..., chunks={len(made)})"
                )
            return [made]
        if made is None:
            return [None] * len(self._drawn.chunks)
        if not isinstance(made, Sequence) or len(made) != len(self._drawn.chunks):
            count = f"{len(made)} iterators" if isinstance(made, Sequence) else "one iterator"
            raise UsageError(
                f"the function build that was given to Data has returned {count}; expected are "
                f"{len(self._drawn.chunks)}, one for each chunk of the model"
            )
        return list(made)


class _Chunk(Iterator[Any]):
    """
    The iterator over the micro-batches of one chunk of the model (the whole model of this rank, or
    a virtual pipeline stage). The iterator takes the micro-batches from the newest iterator that
    the script's function `build` has made.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.count = 0

    def __next__(self) -> Any:  # Any: a micro-batch may have any type
        if self.batches is None:
            raise UsageError(
                "a micro-batch was drawn, but this rank has no iterator: call data.begin(step) at "
                "the beginning of each step, and let `build` return an iterator on this rank"
            )
        batch = next(self.batches)
        self.count += 1
        return batch


class _Drawn:
    """
    Counts the micro-batches that each chunk of the model has drawn in the present step.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = [_Chunk() for _ in range(chunks)]
        self._expected = 0

    def begin_at(self, made: Sequence[Iterator[Any] | None]) -> None:
        for chunk, batches in zip(self.chunks, made, strict=True):
            chunk.batches = batches

    def let_go(self) -> None:
        for chunk in self.chunks:
            chunk.batches = None

    def expect(self, number: int) -> None:
        self._expected = number
        for chunk in self.chunks:
            chunk.count = 0

    def check(self, step: int) -> None:
        """
        Check, when a step is over, that each chunk has drawn all its micro-batches or none. A chunk
        draws none if its rank gets the micro-batches from another rank. Raises `UsageError` if a
        chunk has drawn only some of its micro-batches.
        """
        for chunk in self.chunks:
            if chunk.count not in (0, self._expected):
                raise UsageError(
                    f"step {step} has drawn {chunk.count} of the {self._expected} micro-batches of "
                    "this rank, so the data position would not match what was trained. Draw all of "
                    "them in their step, and take the micro-batches of an evaluation from another "
                    "iterator"
                )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """
    Restore, at the end, the random generators of the process: torch, Python, numpy, and the device
    that this process uses.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and not torch.get_device_module(device).is_initialized():
        device = None  # nothing was drawn on the device, and to ask it would begin to use it
    present = generators(device)
    try:
        yield
    finally:
        restore(present, device)


def _begun_later(batches: Iterator[Any] | None, consumed: int) -> Iterator[Any] | None:
    """
    Return an iterator over the same micro-batches. If `batches` comes from a generator function, and
    has not begun to run, then what it draws for its first micro-batch is undone.

    A generator function makes a loader's iterator, which draws a seed, only when its first
    micro-batch is asked for.
    """
    if isgenerator(batches) and getgeneratorstate(batches) == GEN_CREATED:
        return _first_undone(batches, consumed)
    return batches


def _first_undone(batches: Iterator[Any], consumed: int) -> Iterator[Any]:
    """
    Yield the micro-batches of `batches`. Undo what is drawn for the first one.

    Raises `UsageError` for the second micro-batch of the data if numbers were drawn for it: then
    each micro-batch is drawn, and those of the first one must not be undone. A later micro-batch is
    not judged, because a loader draws a seed whenever it is gone through again.
    """
    held: list[Any] = []  # emptied below: a micro-batch must not be kept for the whole training
    with _undisturbed():
        held += islice(batches, 1)
    while held:
        yield held.pop()
    if not consumed:
        drawn = packed(generators())
        held += islice(batches, 1)
        if packed(generators()) != drawn:
            raise UsageError(
                "the generator function that gives Data its micro-batches draws from the random "
                "generators of the process (torch's default generator, random, numpy.random) for "
                "each of them, so other numbers would be drawn after an incident: draw from a "
                "generator of your own, which is seeded by the number of the sample"
            )
        while held:
            yield held.pop()
    yield from batches


def _calculator() -> Any:  # Any: an object of Megatron, which gives mypy no types
    from megatron.core import num_microbatches_calculator

    present = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if present is None:
        raise UsageError(
            "Megatron's calculator of micro-batches does not exist: call "
            "megatron.core.num_microbatches_calculator.init_num_microbatches_calculator before "
            "Data is made"
        )
    return present
