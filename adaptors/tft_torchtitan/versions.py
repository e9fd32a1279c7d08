"""
The versions of TorchTitan for which this adaptor was written.
"""

from tft_pytorch.versions import KnownVersions

# other versions are refused, because this adaptor relies on the order in which the Trainer calls
# its methods, and on what its constructor makes
TORCHTITAN = KnownVersions(
    adaptor="torchtitan", package="torchtitan", oldest="0.3", unknown="0.4",
    differs="whose Trainer may call its methods in another order",
)  # fmt: skip
