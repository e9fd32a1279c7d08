"""
Checks that the installed Transformers and accelerate have the versions for which this adaptor was
written.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tft.errors import UsageError

KNOWN: Mapping[str, str] = {"transformers": "5", "accelerate": "1.15"}
"""The versions whose code this adaptor relies on: `trainer.py` overrides methods of the `Trainer`
that are not public, and `wrapping.py` and `batches.py` use attributes of accelerate's objects."""


def check_versions() -> None:
    """
    Raise `UsageError` if Transformers or accelerate is missing, or has another version than `KNOWN`.
    """
    for name, known in KNOWN.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UsageError(
                f"the adaptor transformers needs {name}, which is not installed: "
                "pip install 'tft-bus[transformers]'"
            ) from None
        if not found.startswith(f"{known}."):
            raise UsageError(
                f"the adaptor transformers was written for {name} {known}, but {found} is "
                f"installed, in which the methods that tft overrides may differ. Install "
                f"'{name}=={known}.*'"
            )
