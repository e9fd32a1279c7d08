"""
Checks that the installed megatron-core has the version for which this adaptor was written.
"""

from tft.errors import UsageError

KNOWN = "0.16"
"""The version of megatron-core whose code this adaptor relies on: `method_hooks.py` replaces
methods of its objects, and `groups.py` uses its variables for process groups. These methods and
variables may be different in the next version."""


def check_megatron() -> None:
    """
    Check that megatron-core is installed in the version `KNOWN`. Raises `UsageError` if
    megatron-core is missing or has another version.
    """
    try:
        import megatron.core
    except ImportError as error:
        raise UsageError(
            f"the adaptor megatron needs megatron-core, which cannot be imported ({error}): "
            "pip install 'tft-bus[megatron]'"
        ) from None
    version = megatron.core.__version__
    if not version.startswith(f"{KNOWN}."):
        raise UsageError(
            f"the adaptor megatron was written for megatron-core {KNOWN}, but {version} is "
            "installed, in which the methods that tft replaces may differ. Install "
            f"'megatron-core>={KNOWN},<0.17'"
        )
