"""
The training state of this process. This module checks Megatron's objects when the script passes
them to `tft_megatron.enable`. Later it captures, copies and restores the state in these objects.
The objects themselves stay the same as long as the process lives.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from tft_pytorch.backups import Backups, ShardInUse
from tft_pytorch.contributions import Contributions
from tft_pytorch.device import Devices
from tft_pytorch.names import named_tensors
from tft_pytorch.noted import Settings
from tft_pytorch.part_digests import digest
from tft_pytorch.waiting_time import waiting_time

if TYPE_CHECKING:
    from tft_megatron.checkpoints import Written

from tft.errors import OrderRefused, UsageError
from tft.spi import Buffer, ShardCopies, ShardPayload, SliceContent, pack, part_digests
from tft_megatron.groups import Parallel
from tft_megatron.initial_sync import begins, has_trained, make_alike
from tft_megatron.method_hooks import Replaced
from tft_megatron.mode_flags import Switches
from tft_megatron.pipeline_check import refuse_other_settings
from tft_megatron.rank_local_state import RankLocalState
from tft_megatron.schedulers import Progress, check_scheduler
from tft_megatron.shards import Shard, shards_of
from tft_megatron.step_cleanup import forget, forget_counts, let_go
from tft_megatron.training import Training, check, common_state

_PARTS = frozenset({"model", "optimizer", "data", "training", "replaced"})
"""The names under which `tft_megatron.enable` passes objects to `adopt`."""


def adopt(
    parts: Mapping[str, Any],  # Any: the user's objects may have any class
    wrap: Callable[[], Any] | None,
    parallel: Parallel,
    contributing: Callable[[], None] | None,
) -> "Adopted":
    """
    Take charge of the objects that `enable` has passed, and return the training state.

    `contributing` is a function that tells tft that this rank is about to take part in the
    all-reduces of the step. It is called at the end of each forward pass, unless it is None. Raises
    `UsageError` for objects that the adaptor cannot handle.
    """
    training = parts.get("training")
    if not isinstance(training, Training) or wrap is not None:
        raise UsageError(
            "a Megatron script does not call session.adopt itself: it calls tft_megatron.begin "
            "before anything is built, and then tft_megatron.enable"
        )
    unknown = sorted(parts.keys() - _PARTS)
    if unknown:
        raise UsageError(
            f"tft_megatron does not know {', '.join(unknown)}: give further objects with state to "
            "tft_megatron.enable as others={'NAME': OBJECT}"
        )
    check(training)
    check_scheduler(training)
    _check_instances(training, parallel)
    return Adopted(training, parts["replaced"], parallel, contributing)


class Adopted:
    """
    The training state in the objects that `adopt` has taken charge of.
    """

    def __init__(
        self,
        training: Training,
        replaced: Replaced,
        parallel: Parallel,
        contributing: Callable[[], None] | None,
    ) -> None:
        self.training = training
        self.backups = Backups()
        """The copies in memory of the state at the end of earlier steps, for a rollback."""
        self._replaced = replaced
        self._parallel = parallel
        self._shards = {each.name: each for each in shards_of(training, parallel.place[0])}
        self._local_state = RankLocalState(training)
        self._switches = Switches(training)
        self._settings = Settings()
        inner = [each.optimizer for each in training.optimizers if each.optimizer is not None]
        scheduler = None if training.scheduler is None else Progress(training.scheduler)
        self._settings.watch(inner, [] if scheduler is None else [scheduler])
        # Make all shards once now, so that state which cannot be moved to another rank raises an
        # error here and not in an incident. None of the user's objects is changed before this
        # check.
        for shard in self._shards.values():
            shard.give()
        pack(self._local_state.digestible())
        parallel.remember(
            {
                "model": list(training.chunks),
                "optimizer": training.optimizer,
                "scheduler": training.scheduler,
            },
            lambda: let_go(training),
        )
        self._devices = training.devices
        self._stands = has_trained(training)
        """True after all ranks have begun training together, or if this rank has loaded a
        checkpoint. `rebuild` makes the parameters of all ranks equal only if it is False on every
        rank."""
        replaced.install()
        self._contributions = Contributions()
        chunks = torch.nn.ModuleList(training.chunks)
        self._contributions.watch(chunks, chunks.parameters())
        waiting_time.watch(training.chunks)
        if contributing is not None:
            say = contributing
            for chunk in training.chunks:
                chunk.register_forward_hook(lambda *_: say())

    @property
    def devices(self) -> Devices:
        """
        The devices on which the model is.
        """
        return self._devices

    # ------------------------------------------------------------ calls between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state at the beginning or, with `closing=True`, at the end of an
        update window.

        With `closing=True`, also drop the settings that `end_step` has stored at the end of the
        previous step.
        """
        if closing:
            self._settings.forget()
        return self._local_state.capture(closing=closing)

    def end_step(self) -> bytes | None:
        """
        Store, at the end of a step, the settings of the optimizers and the scheduler (such as
        learning rates), which the script may change before the next update window. `clear` restores
        the stored settings.

        Return the rank-local state if the tail of the step has changed it, else None.
        """
        self._settings.note()
        return self._local_state.end_step()

    def before_abort(self) -> None:
        """
        Store the settings that `end_step` stores, if the script is in the tail of a step (after the
        update window). tft calls this method before it aborts collectives on a device, on another
        thread than the script's. After the abort the script may compute with wrong results, and set
        wrong settings.
        """
        self._settings.note_in_tail()

    def set_aside(self) -> Callable[[], None]:
        """
        Return a function that gives the random generators their present state again, the modules
        their present modes (training or evaluation), and the buffers that the forward pass changes
        their present content.
        """
        return self._local_state.set_aside(self.training)

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state and the modes of the modules, and drop the gradients.
        Return a sentence if a part of the state was lost.

        Also reset the routers' counts of tokens, and forget the optimizer step that was
        interrupted.
        """
        lost = self._local_state.rollback(local_state)
        # `rebuild` comes before every rollback, and has made the parameters of all ranks equal
        self._stands = True
        forget_counts(self.training)
        self._replaced.forget()
        self._switches.put_back()
        for chunk in self.training.chunks:
            chunk.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        return lost

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._local_state.generators()

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches of the data.
        """
        self._local_state.skip(batches)

    def updated(self) -> None:
        """
        Gather on every rank the parameters that other ranks have updated. This method is called
        when the update window has closed.

        Do nothing if Megatron gathers the parameters itself during the next forward pass
        (`overlap_param_gather`).
        """
        for chunk in self.training.chunks:
            if self.training.distributed and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    # ------------------------------------------------------------ groups

    def clear(self) -> None:
        """
        Drop the temporary state of the interrupted step, and all references to process groups
        outside of the user's objects.

        Give the buffers and extra states that the forward pass changes, and the settings that
        scripts change, the values that they had at the end of the last complete step.
        """
        self.backups.wait()
        forget(self.training)
        self._contributions.forget()
        self._local_state.rewind()
        self._settings.put_back()

    @torch.no_grad()
    def rebuild(self) -> Any:  # Any: chunks of the model, whose class gives mypy no types
        """
        Compute the parameters from the master weights, and gather them on all ranks. Return the
        model chunk, or the sequence of chunks if there are several.

        All ranks call this method together. At the beginning of a job, this method first checks
        that the pipeline stages fit together, and makes the parameters of the ranks equal.
        """
        self.backups.wait()
        self._switches.begin()
        if begins(self.training, self._stands):
            refuse_other_settings(self.training)
            make_alike(self.training)
        for optimizer in self.training.optimizers:
            if hasattr(optimizer, "_copy_main_params_to_model_params"):
                optimizer._copy_main_params_to_model_params()
        if self.training.distributed:
            for chunk in self.training.chunks:
                chunk.start_param_sync(force_sync=True)
        self._local_state.running.rest()
        return self.training.chunks[0] if len(self.training.chunks) == 1 else self.training.chunks

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold it.

        Raises `UsageError` if `tft_megatron.begin` was called with another rank or world size.
        """
        if (rank, world) != self._parallel.place:
            raise UsageError(
                f"this is rank {rank} of {world}, but tft_megatron.begin was called as rank "
                f"{self._parallel.place[0]} of {self._parallel.place[1]}"
            )
        return [
            ShardCopies(shard=shard.name, ranks=shard.holders) for shard in self._shards.values()
        ]

    def give(self, shard: str) -> ShardPayload:
        """
        Return the shard in the form in which it is sent to another rank.
        """
        return self.shard(shard).give()

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Reserve memory for a shard with the description `meta`. Return the memory as writable
        buffers.
        """
        self.backups.wait()
        return self.shard(shard).take(meta)

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Put the received shard into use. This method is called when the content of all its buffers
        has arrived.
        """
        self.shard(shard).taken(meta)
        self._forget()

    # ------------------------------------------------------------ copies of earlier steps

    def in_use(self) -> dict[str, ShardInUse]:
        """
        Return all shards of this rank as they are now, so that the caller can copy them.
        """
        return {name: shard.in_use() for name, shard in self._shards.items()}

    def restore(self, step: int) -> None:
        """
        Restore the state from the copy in memory that was made at the end of `step`. Raises
        `OrderRefused` if there is no such copy, or if it does not fit the model.
        """
        self.backups.put_back(
            step,
            self._shards,
            lambda shard, meta: self.shard(shard).room(meta),
            lambda shard, meta, tensors: self.shard(shard).settle(meta, tensors),
        )
        self._forget()

    def _forget(self) -> None:
        """
        Forget the stored values that `clear` would restore, because these values belong to a state
        that has been replaced.
        """
        self._local_state.forget()
        self._settings.forget()

    # ------------------------------------------------------------ checkpoints

    def save(self, directory: Path, shard: str, step: int) -> list[str]:
        """
        Write the shard under `directory`. Return the names of the written files.
        """
        # imported here, because this import loads megatron-core
        from tft_megatron.checkpoints import save

        return save(directory, shard, self._written(shard, step))

    def stage(self, shard: str, step: int) -> Callable[[Path], list[str]]:
        """
        Copy the shard into host memory. Return a function that writes the copy into a directory
        later.
        """
        from tft_megatron.checkpoints import stage

        return stage(shard, self._written(shard, step))

    def load(self, directory: Path, shard: str) -> None:
        """
        Load a shard that `save` wrote.
        """
        from tft_megatron.checkpoints import load

        own = self.shard(shard)
        self.backups.wait()
        own.settle(*load(directory, shard, own.room))
        self._stands = True
        self._forget()

    def replaced(self) -> None:
        """
        Forget the stored values of the earlier state, because the script has loaded new content
        into its objects.
        """
        self._stands = True
        self._forget()

    def _written(self, name: str, step: int) -> "Written":
        from tft_megatron.checkpoints import Written
        from tft_megatron.layout import FORM, REST, content_of, part

        shard = self.shard(name)
        # `self._shards` has the order in which `shards_of` returns the shards: first the shard
        # `REST`, then one shard for each optimizer
        kinds = dict(zip(self._shards, (REST, *range(len(self.training.optimizers))), strict=True))
        content = content_of(kinds[name], self.training.chunks, self.training.optimizer)
        if content.common:
            content.common |= common_state(self.training, step)
            if self.training.distributed:
                # megatron-core needs the entry `content_metadata` to load the optimizer state
                content.common["content_metadata"] = dict(FORM)
        _, tensors = shard.taken_apart()
        return Written(described=shard.give().meta, own=tensors, content=content, part=part())

    # ------------------------------------------------------------ digests

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return a digest of each part of a shard, by the name of the part, for comparison with the
        other holders of the shard.
        """
        payload = self.give(shard)
        own = self._local_state.running.own(buffer.name for buffer in payload.buffers)
        return part_digests(payload, own)

    def slices(self, shard: str) -> SliceContent:
        """
        Return the part of a shard's content that must be equal on all holders of the shard. tft
        compares the copies of this part while the job trains.
        """
        payload = self.give(shard)
        own = self._local_state.running.own(buffer.name for buffer in payload.buffers)
        kept = [buffer for buffer in payload.buffers if buffer.name not in own]
        # some of the buffers are copies, which do not follow later steps, so the result may be used
        # in this step only
        return SliceContent.of_one_step(payload.meta, kept)

    def contribution(self) -> int | None:
        """
        Return a digest of what this rank contributed to the gradients of the last step, or None if
        its gradients were not watched in that step.
        """
        return self._contributions.digest()

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters` (with the buffers and extra states of modules), `optimizer` (this
        rank's shards: its share of the optimizers, and the state that belongs to no optimizer), `scheduler`, and `rng`
        and `data` of the rank-local state.
        """
        parameters = {
            f"{number}.{name}": tensor
            for number, chunk in enumerate(self.training.chunks)
            for name, tensor in named_tensors(chunk).items()
        }
        found = [shard.taken_apart() for shard in self._shards.values()]
        tensors = {
            f"{number}.{name}": tensor
            for number, (_, kept) in enumerate(found)
            for name, tensor in kept.items()
        }
        scheduler = self.training.scheduler
        local_state = self._local_state.digestible()
        return {
            "parameters": digest(self._local_state.extra, parameters),
            "optimizer": digest([plain for plain, _ in found], tensors),
            "scheduler": digest(None if scheduler is None else scheduler.state_dict(), {}),
            **{name: xxhash.xxh3_128_hexdigest(pack(kept)) for name, kept in local_state.items()},
        }

    def shard(self, name: str) -> Shard:
        """
        Return the shard with the name `name`. Raises `OrderRefused` if this rank has no such shard.
        """
        if name not in self._shards:
            raise OrderRefused(
                f"this rank has no shard {name!r}; the shards of this rank are {list(self._shards)}"
            )
        return self._shards[name]


def _check_instances(training: Training, parallel: Parallel) -> None:
    begun = parallel.sizes.get("num_distributed_optimizer_instances", 1)
    if training.instances != begun:
        raise UsageError(
            "the model's DistributedDataParallelConfig has "
            f"num_distributed_optimizer_instances={training.instances}, but tft_megatron.begin was "
            f"given {begun}: give both the same number"
        )
