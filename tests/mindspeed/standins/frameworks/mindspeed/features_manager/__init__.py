"""
MindSpeed features to which MindSpeed-LLM's code refers.
"""

from typing import Any


class ReuseFP32Param:
    """
    A feature that the high availability names in order to keep it from being patched in.
    """

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        Register nothing.
        """
