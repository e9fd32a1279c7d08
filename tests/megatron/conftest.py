"""
What the tests of the adaptor for Megatron share.
"""

from tests.megatron.jobs import undisturbed

__all__ = ["undisturbed"]
