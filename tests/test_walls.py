"""
The imports of extensions. import-linter lists the forbidden imports, and this test lists the
allowed ones.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "tft_pytorch": ROOT / "adaptors/tft_pytorch",
    "tft_megatron": ROOT / "adaptors/tft_megatron",
    "tft_mindspore": ROOT / "adaptors/tft_mindspore",
    "tft_lightning": ROOT / "adaptors/tft_lightning",
    "tft_torchtitan": ROOT / "adaptors/tft_torchtitan",
    "tft_transformers": ROOT / "adaptors/tft_transformers",
    "tft_chaos": ROOT / "plugins/tft_chaos",
    "tft_loggers": ROOT / "plugins/tft_loggers",
    "tft_otel": ROOT / "plugins/tft_otel",
    "tft_prometheus": ROOT / "plugins/tft_prometheus",
    "mindio_ttp": ROOT / "adaptors/mindio_ttp/src/mindio_ttp",
}
PUBLIC = {"tft", "tft.spi", "tft.errors"}
MORE = {
    "tft_pytorch": {"tft.spi.generators", "tft.spi.plain_values"},
    "tft_megatron": {"tft.spi.generators"},
    "tft_mindspore": {"tft.spi.generators", "tft.spi.plain_values"},
    "tft_lightning": {"tft.spi.plain_values"},
    "tft_transformers": {"tft.spi.plain_values"},
    "mindio_ttp": {"tft.spi.launcher"},
}
"""The modules that a package may import in addition."""


def imported(path: Path) -> Iterator[str]:
    """
    Yield the modules of tft that a file imports.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tft":
            submodules = [f"tft.{alias.name}" for alias in node.names]
            names = [
                n if (ROOT / f"{n.replace('.', '/')}.py").exists() else "tft" for n in submodules
            ]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tft")


@pytest.mark.parametrize("package", PACKAGES)
def test_extension_imports_only_the_public_modules_of_tft(package: str) -> None:
    """When an extension imports a module of tft, then the module is `tft`, `tft.spi`, `tft.errors`
    or one explicitly allowed for this extension."""
    allowed = PUBLIC | MORE.get(package, set())
    others = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in PACKAGES[package].rglob("*.py")
        for name in imported(path)
        if name not in allowed
    }
    assert others == set()
