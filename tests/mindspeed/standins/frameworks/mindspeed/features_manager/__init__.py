"""
Features that others refer to.
"""

from typing import Any


class ReuseFP32Param:
    """
    Named by the high availability, which keeps it from being patched in.
    """

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        Nothing is.
        """
