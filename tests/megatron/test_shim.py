"""
What stands in for CUDA is for tests: nothing that is shipped takes part in it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.jobs import ROOT

SHIM = ROOT / "tests" / "megatron" / "shim.py"
LINES = 60


def test_nothing_that_is_shipped_replaces_a_part_of_torch_cuda() -> None:
    """
    When the adaptor's files are read, then none assigns to `torch.cuda`, to what is in it, or to tensors.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "adaptors" / "tft_megatron").glob("*.py"))
        for line in _replaced(path)
    ]
    assert found == []


def test_the_shim_is_seen_by_that_reading() -> None:
    """
    When the shim itself is read in this way, then it is found.
    """
    assert list(_replaced(SHIM))


def test_the_shim_stays_small() -> None:
    """
    When more and more of CUDA were pretended, it would no longer be Megatron that is tested.
    """
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
