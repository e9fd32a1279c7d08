"""
Access to MindSpeed-LLM's high availability: unchanged files of MindSpeed-LLM, or the stand-in.

MindSpeed-LLM's packages import many others. This module therefore replaces the packages by empty
ones with a path into MindSpeed-LLM's directory. Only the high availability files, and the files
that they patch into Megatron, are then imported. From files that import too much, only the
patched-in functions are extracted.
"""

import ast
import importlib
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

STANDIN = Path(__file__).parent / "standins" / "llm"
BARE = (
    "mindspeed_llm", "mindspeed_llm.core", "mindspeed_llm.core.transformer", "mindspeed_llm.core.transformer.moe",
    "mindspeed_llm.features_manager", "mindspeed_llm.tasks", "mindspeed_llm.training",
)  # fmt: skip
TAKEN = {
    "mindspeed_llm.training.training": ("num_floating_point_operations_wrapper",),
    "mindspeed_llm.training.utils": ("is_last_rank_wrapper", "print_rank_last_wrapper"),
}
"""The functions that are extracted from the file of each module."""
PATCHING = (
    "mindspeed_llm.core.distributed.param_and_grad_buffer",
    "mindspeed_llm.core.distributed.distributed_data_parallel", "mindspeed_llm.core.optimizer",
    "mindspeed_llm.core.optimizer.clip_grads", "mindspeed_llm.core.optimizer.distrib_optimizer",
)  # fmt: skip
"""The modules from which `mindspeed_llm.core` takes the names that the high availability needs."""
HIGH_AVAILABILITY = "mindspeed_llm.core.high_availability"


def install(source: str) -> None:
    """
    Make `mindspeed_llm` importable: from the directory `source`, or the stand-in if `source` is
    empty.
    """
    if not source:
        sys.path.insert(0, str(STANDIN))
        return
    root = Path(source)
    for name in BARE:
        _module(name).__path__ = [str(root.joinpath(*name.split(".")))]
    vars(sys.modules["mindspeed_llm.core"])["__getattr__"] = _of_core
    _module("mindspeed_llm.core.transformer.moe.router").global_load_balancing_loss_func = None
    for name, functions in TAKEN.items():
        _take(_module(name), root.joinpath(*name.split(".")).with_suffix(".py"), functions)


def modules(source: str) -> list[str]:
    """
    Return the names of all high availability modules in a directory of MindSpeed-LLM.
    """
    found = Path(source).joinpath(*HIGH_AVAILABILITY.split(".")).glob("*.py")
    return sorted(f"{HIGH_AVAILABILITY}.{path.stem}" for path in found if path.stem != "__init__")


def is_old(source: str) -> bool:
    """
    Return whether the directory holds MindSpeed-LLM 2.3.0 or an earlier version.
    """
    utils = Path(source).joinpath(*HIGH_AVAILABILITY.split(".")) / "utils.py"
    return "TRAIN_PARAM" in utils.read_text()


def _module(name: str) -> Any:  # Any: the caller adds attributes to the module
    module = sys.modules[name] = ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _of_core(name: str) -> Any:
    for place in PATCHING if name.endswith("_wrapper") else ():
        with suppress(ModuleNotFoundError):  # not every version has each of these files
            found = getattr(importlib.import_module(place), name, None)
            if found is not None:
                return found
    raise AttributeError(f"mindspeed_llm.core is bare here, and has no {name}")


def _take(module: Any, path: Path, names: tuple[str, ...]) -> None:
    tree = ast.parse(path.read_text())
    wanted = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert [node.name for node in wanted] == list(names), f"{path} has no functions {names}"
    begin = ast.parse(
        "from functools import wraps\nimport torch\nfrom megatron.training import get_args"
    ).body
    exec(compile(ast.Module([*begin, *wanted], []), str(path), "exec"), vars(module))


# ---------------------------------------------------------------- differences between versions


def _high_availability() -> Any:
    return importlib.import_module(HIGH_AVAILABILITY)


def _nested() -> bool:
    """
    Return whether the training function takes two arguments: the list of the loop's objects and the
    test data.

    Versions up to 2.3.0 do.
    """
    utils = importlib.import_module(f"{HIGH_AVAILABILITY}.utils")
    return hasattr(utils.ha_constant, "TRAIN_PARAM")


def register(*providers: Any) -> None:
    """
    Register the program's functions and its replica groups with MindIO.
    """
    from megatron.training import get_args, training

    loop: Any = sys.modules.get("mindspeed_llm.training.training")
    if loop is not None:
        loop.train = training.train
    found = _high_availability()
    found.tft_register_processor(*(providers if _nested() else ()))
    if get_args().enable_elastic_training:
        found.register_callbacks()


def train(train_args: list[Any], test_data: list[Any]) -> None:
    """
    Run the training loop under MindIO's handler, which runs it again after every incident.
    """
    found = _high_availability()
    if _nested():
        found.tft_train(train_args, test_data)
    else:
        found.tft_train(*train_args)


def reboot() -> bool:
    """
    Return whether this process replaces a lost process.
    """
    return bool(_high_availability().tft_is_arf_reboot_node())


def scaled_in() -> bool:
    """
    Return whether fewer ranks train at the moment.
    """
    common = importlib.import_module(f"{HIGH_AVAILABILITY}.elastic_training_common")
    return bool(common.zit_scale_in_running_state())
