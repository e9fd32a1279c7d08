"""
Tests that all names of `mindio_ttp` that MindSpore's installed files use exist.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from mindio_ttp import controller_ttp, framework_ttp

FILES = ("train/callback/_train_fault_tolerance.py", "train/model.py", "utils/utils.py")


def tree(name: str) -> ast.Module:
    """
    Return the syntax tree of one of MindSpore's files.
    """
    spec = find_spec("mindspore")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / name).read_text())


def called(module: ast.Module) -> set[str]:
    """
    Return the names of all attributes that a file reads from an object called `tft`.
    """
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", "") == "tft" or getattr(node.value, "attr", "") == "tft")
    }


@pytest.mark.parametrize("name", FILES)
def test_every_framework_name_that_mindspore_uses_exists(name: str) -> None:
    """When MindSpore uses a name of `mindio_ttp.framework_ttp`, then that name exists."""
    names = called(tree(name))
    assert names
    assert [each for each in sorted(names) if not hasattr(framework_ttp, each)] == []


def test_every_controller_name_that_mindspore_imports_exists() -> None:
    """When MindSpore imports a name from `mindio_ttp.controller_ttp`, then that name exists."""
    names = {
        alias.name
        for node in ast.walk(tree("utils/utils.py"))
        if isinstance(node, ast.ImportFrom) and node.module == "mindio_ttp.controller_ttp"
        for alias in node.names
    }
    assert len(names) == 5
    assert all(hasattr(controller_ttp, name) for name in names)
