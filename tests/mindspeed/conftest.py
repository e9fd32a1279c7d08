"""
Settings for the MindSpeed-LLM tests, which `make test-mindspeed` runs.

The tests have their own environment with the megatron-core version that MindSpeed-LLM requires. In
another environment, with another megatron-core, pytest does not collect these tests.
"""

from importlib.metadata import PackageNotFoundError, version

from tests.mindspeed.jobs import undisturbed

__all__ = ["undisturbed"]


def _megatron() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return ""


collect_ignore_glob = [] if _megatron().startswith("0.12.") else ["test_*.py"]
