"""
A pytest plugin for MindSpeed-LLM's own tests. It makes MindSpeed-LLM and its imports importable.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "standins" / "frameworks"))

import torch_npu  # noqa: F401  # imported first, as in MindSpeed-LLM

from tests.mindspeed import llm

llm.install(os.environ["MINDSPEED_LLM"])


class FeatureAdaptor:
    """
    A stand-in without effect. MindSpeed-LLM's tests replace `execute`, so that Megatron stays
    unpatched.
    """

    @staticmethod
    def execute() -> None:
        """
        Do nothing.
        """


adaptor: Any = ModuleType("mindspeed_llm.tasks.megatron_adaptor_v2")
adaptor.FeatureAdaptor = FeatureAdaptor
sys.modules[adaptor.__name__] = adaptor
vars(sys.modules["mindspeed_llm.tasks"])["megatron_adaptor_v2"] = adaptor
