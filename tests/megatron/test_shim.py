"""The shim for CUDA is for tests only: no shipped file uses it or does the same."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.jobs import ROOT

SHIM = ROOT / "tests" / "megatron" / "shim.py"
LINES = 60


def test_no_shipped_file_replaces_a_part_of_torch_cuda() -> None:
    """When the adaptor's files are read, then none assigns to `torch.cuda`, to its attributes, or
    to attributes of tensors."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "adaptors" / "tft_megatron").glob("*.py"))
        for line in _replaced(path)
    ]
    assert found == []


def test_the_check_finds_the_assignments_of_the_shim() -> None:
    """When the same check reads the shim itself, then it finds the assignments of the shim."""
    assert list(_replaced(SHIM))


def test_the_shim_stays_small() -> None:
    """When the shim is read, then it is below its size limit: with more of CUDA replaced, the tests
    would no longer test Megatron."""
    assert len(SHIM.read_text().splitlines()) <= LINES


def _replaced(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            written = [ast.unparse(target) for target in node.targets]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            written = [f"{ast.unparse(node.args[0])}."]
        else:
            continue
        if any(each.startswith(("torch.", "cuda.", "tensor.")) for each in written):
            yield node.lineno
