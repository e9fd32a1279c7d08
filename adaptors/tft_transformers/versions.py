"""
The versions of Transformers and accelerate for which this adaptor was written.
"""

from tft_pytorch.versions import KnownVersions

_DIFFERS = "in which the methods that tft overrides may differ"

# `trainer.py` overrides methods of the `Trainer` that are not public. Version 5.3 has other
# methods, so it is not supported.
TRANSFORMERS = KnownVersions(
    adaptor="transformers", package="transformers", oldest="5.4", unknown="6", differs=_DIFFERS
)
# `wrapping.py` and `batches.py` use attributes of accelerate's objects that are not public
ACCELERATE = KnownVersions(
    adaptor="transformers", package="accelerate", oldest="1.15", unknown="2", differs=_DIFFERS
)


def check_versions() -> None:
    """
    Raise `UsageError` if Transformers or accelerate is missing, or has an unknown version.
    """
    TRANSFORMERS.check()
    ACCELERATE.check()
