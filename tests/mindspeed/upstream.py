"""
A plugin of pytest's for MindSpeed-LLM's own tests: it makes MindSpeed-LLM and what it imports importable.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "standins" / "frameworks"))

import torch_npu  # noqa: F401  # first of all, as in MindSpeed-LLM

from tests.mindspeed import llm

llm.install(os.environ["MINDSPEED_LLM"])


class FeatureAdaptor:
    """
    MindSpeed-LLM's tests replace its one function, so that nothing of Megatron's is patched.
    """

    @staticmethod
    def execute() -> None:
        """
        Nothing is.
        """


adaptor: Any = ModuleType("mindspeed_llm.tasks.megatron_adaptor_v2")
adaptor.FeatureAdaptor = FeatureAdaptor
sys.modules[adaptor.__name__] = adaptor
vars(sys.modules["mindspeed_llm.tasks"])["megatron_adaptor_v2"] = adaptor
