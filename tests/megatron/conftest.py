"""
Fixtures that all tests of the Megatron adaptor share.
"""

from tests.megatron.jobs import undisturbed

__all__ = ["undisturbed"]
