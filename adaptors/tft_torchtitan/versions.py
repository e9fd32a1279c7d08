"""
The versions of TorchTitan for which this adaptor was written.
"""

from tft_pytorch.versions import KnownVersions

# this adaptor relies on which methods the Trainer calls in which order, and what its constructor makes
TORCHTITAN = KnownVersions(
    adaptor="torchtitan", package="torchtitan", oldest="0.3", unknown="0.4",
    differs="whose Trainer may call its methods in another order",
)  # fmt: skip
