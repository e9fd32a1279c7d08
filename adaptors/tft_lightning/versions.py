"""
The versions of Lightning for which this adaptor was written.
"""

from tft_pytorch.versions import KnownVersions

# other versions are refused, because the loops that this adaptor drives, and their counters, are
# private parts of Lightning
LIGHTNING = KnownVersions(
    adaptor="lightning", package="lightning", oldest="2.6", unknown="2.7",
    differs="whose training loops may differ",
)  # fmt: skip
