"""
Keeps the metrics that a script logs with `self.log` as rank-local state: the totals of the present
epoch so far, the values of the last step, and the states of the torchmetrics in the model and in
callbacks.
"""

import builtins
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from tft_pytorch.plain_values import plain
from torch import nn
from torchmetrics import Metric

from tft_lightning.kept_attributes import held_metrics

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
_SUMS = ("value", "cumulated_batch_size")


def noted_results(results: Any) -> dict[str, Any]:  # Any: Lightning has no types for mypy here
    """
    Return the content of a result collection as plain values.
    """
    return {key: _noted(metric) for key, metric in results.items()}


def restore_results(results: Any, noted: Mapping[str, Any], module: Any) -> None:
    """
    Give `results`, the result collection of the module `module`, the content `noted`: a result of
    `noted_results` of this process or another one, from which `placed` has made values again.
    """
    for key in [key for key in results if key not in noted]:
        del results[key]
    for key, row in noted.items():
        metric = results.get(key)
        if metric is None:
            metric = results[key] = _made(json.loads(row["about"]), module)
        for name, value in row["state"].items():
            setattr(metric, name, value)


def restart_results(results: Any) -> None:
    """
    Make `results`, the result collection of evaluations, empty as before an evaluation. An
    evaluation that was interrupted may have added values to it.
    """
    results.clear()
    fresh = _ResultCollection(training=results.training)
    for name in ("batch", "batch_size", "dataloader_idx"):
        setattr(results, name, getattr(fresh, name))


def _noted(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    state = {
        name: plain(getattr(metric, name))
        for name in _SUMS
        if metric.is_tensor and hasattr(metric, name)
    }
    about = {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": [
            getattr(meta.reduce_fx, "__module__", "torch") == "builtins",
            meta.reduce_fx.__name__,
        ],
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "tensor": metric.is_tensor,
    }
    return {
        # one JSON text, because packing a text takes less time than packing its many values
        "about": json.dumps(about),
        "state": {
            **state,
            "has_reset": metric.has_reset,
            "_forward_cache": plain(metric._forward_cache),
            "_computed": plain(metric._computed),
            "_update_count": metric._update_count,
        },
    }


def _made(about: Mapping[str, Any], module: Any) -> Any:
    builtin, name = about["reduce"]
    meta = _Metadata(reduce_fx=getattr(builtins if builtin else torch, name), **about["meta"])
    should, rank_zero_only = about["sync"]
    meta.sync = _Sync(
        _should=should, fn=module.trainer.strategy.reduce, rank_zero_only=rank_zero_only
    )
    metric = _ResultMetric(meta, about["tensor"])
    if not about["tensor"]:
        metric.value = module.get_submodule(about["meta"]["metric_attribute"])
    return metric.to(module.device)


# ---------------------------------------------------------------- torchmetrics


def _metrics(module: nn.Module, callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    found = chain(module.named_modules(), held_metrics(callbacks))
    return ((name, each) for name, each in found if isinstance(each, Metric))


def noted_metrics(module: nn.Module, callbacks: Iterable[Any] = ()) -> dict[str, Any]:
    """
    Return the states of all torchmetrics in `module` and of those in `callbacks`, by name.
    """
    return {
        name: {
            "count": metric._update_count,
            "states": {state: plain(getattr(metric, state)) for state in metric._defaults},
        }
        for name, metric in _metrics(module, callbacks)
    }


def restore_metrics(
    module: nn.Module, noted: Mapping[str, Any], callbacks: Iterable[Any] = ()
) -> None:
    """
    Give the torchmetrics in `module` and in `callbacks` the states that `noted_metrics` has returned.
    """
    for name, metric in _metrics(module, callbacks):
        if name not in noted:
            continue
        for state, value in noted[name]["states"].items():
            moved = (
                [each.to(metric.device) for each in value]
                if isinstance(value, list)
                else value.to(metric.device)
            )
            setattr(metric, state, moved)
        metric._update_count = noted[name]["count"]
        # An interrupted `compute` may have replaced the states of this rank by those of all ranks,
        # and marked the metric as synchronized. The states of this rank are restored now, so remove
        # the mark.
        metric._computed = metric._cache = None
        metric._is_synced = False
