"""
Refuses settings of a `Trainer` with which training could not go on after an incident, or would
compute other results than without the incident. Everything is checked before anything is changed.
"""

from collections.abc import Iterator
from typing import Any

import transformers
from torch.utils.data import IterableDataset

from tft.errors import UsageError

_SWITCHES = {
    "auto_find_batch_size": "training would begin anew with another batch size: set the batch size",
    "push_to_hub": "an upload would be repeated after an incident: upload when training is over",
    "enable_jit_checkpoint": "ranks would save at different steps: use tft run, which saves a last "
    "checkpoint when it gets SIGTERM",
    "ignore_data_skip": "a process that replaces a rank must begin at the position of the rank: "
    "leave it out",
    "torch_compile": "this was not tried with tft: leave it out",
    "deepspeed": "DeepSpeed distributes the state over the ranks, so nobody has that of a lost rank",
    "fsdp": "FSDP distributes the state over the ranks, so nobody has that of a lost rank: use DDP, "
    "or write the loop as docs/howto/pytorch.md says for models that are cut up",
    "batch_eval_metrics": "compute_metrics adds up batches in objects of its own, which an evaluation "
    "that is repeated would add twice: leave it out",
    "parallelism_config": "only data parallelism is supported: leave it out",
}
_OPTIMIZERS = {
    "schedule_free": "it changes the parameters before each evaluation",
    "layerwise": "it changes the parameters during the backward pass",
    "lomo": "it changes the parameters during the backward pass",
}
_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
_SCHEDULER_TYPES = ("ReduceLROnPlateau", "GreedyLR")


def check(trainer: Any, world: int) -> None:  # Any: transformers.Trainer, which has no types
    """
    Raise `UsageError`, with the reason, if `trainer` cannot be made fault tolerant. `world` is the
    number of ranks of the job.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise UsageError(
            f"tft_transformers.prepare takes a transformers.Trainer, not a {type(trainer).__name__}"
        )
    for why in _reasons(trainer, world):
        raise UsageError(why)


def _reasons(trainer: Any, world: int) -> Iterator[str]:
    args = trainer.args
    if args.world_size != world:
        yield (
            f"TrainingArguments see {args.world_size} of the {world} ranks: call "
            "tft_transformers.init() before they are made, and set use_cpu=True on a machine "
            "without accelerators"
        )
    for name, why in _SWITCHES.items():
        if getattr(args, name, None):
            yield f"TrainingArguments have {name} set; {why}"
    optimizer = str(_value(args.optim))
    for name, why in _OPTIMIZERS.items():
        if name in optimizer:
            yield f"the optimizer {optimizer} cannot be used with tft, because {why}"
    yield from _reasons_of_objects(trainer)
    yield from _reasons_of_data(trainer)
    yield from _reasons_of_model(trainer)


def _reasons_of_objects(trainer: Any) -> Iterator[str]:
    """
    Yield the reasons to refuse the scheduler, or an optimizer that the user has given as an object
    or as a class.
    """
    named, given = str(_value(trainer.args.lr_scheduler_type)), type(trainer.lr_scheduler).__name__
    for scheduler, refused in ((named, _SCHEDULERS), (given, _SCHEDULER_TYPES)):
        if scheduler in refused:
            yield (
                f"the scheduler {scheduler} changes the learning rate outside of a step: use another"
            )
    made = getattr(trainer, "optimizer_cls_and_kwargs", None)
    kind = type(trainer.optimizer) if made is None else made[0]
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        yield (
            f"the optimizer {kind.__name__} has the methods train and eval, which change the "
            "parameters outside of a step: use another"
        )


def _reasons_of_data(trainer: Any) -> Iterator[str]:
    if trainer.train_dataset is None:
        yield "the Trainer has no train_dataset, so there is nothing that tft could protect"
    if isinstance(trainer.train_dataset, IterableDataset):
        yield (
            "the train_dataset is an IterableDataset, whose position cannot be known: use a "
            "dataset with __len__ and __getitem__"
        )
    loading = trainer.accelerator.dataloader_config
    if loading.dispatch_batches:
        yield "accelerator_config has dispatch_batches set: let each rank read its own batches"
    if not loading.use_seedable_sampler:
        yield "accelerator_config has use_seedable_sampler=False: leave it out"


def _reasons_of_model(trainer: Any) -> Iterator[str]:
    if trainer.model_init is not None:
        yield "the Trainer has a model_init: give it a model"
    if trainer.model_wrapped is not trainer.model:
        yield "the model of the Trainer is wrapped already: give it the plain model"
    # use `getattr`, because Trainers of Transformers 5.17 do not have this attribute
    loaded_in_parts = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if loaded_in_parts or trainer.is_model_parallel:
        yield "the model is distributed over devices or ranks: only data parallelism is supported"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield "accelerate is configured for DeepSpeed or FSDP: only data parallelism is supported"


def _value(choice: Any) -> Any:  # Any: an enum's member or a text
    return getattr(choice, "value", choice)
