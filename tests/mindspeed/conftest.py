"""
`make test-mindspeed` runs these tests, in an environment of their own with the megatron-core that MindSpeed-LLM
is written for. Elsewhere there is another one, and they are not collected.
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
