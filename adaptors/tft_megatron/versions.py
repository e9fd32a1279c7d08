"""
Which megatron-core this adaptor was written for.
"""

from tft.errors import UsageError

KNOWN = "0.16"
"""What is replaced on instances (`replaced.py`), and where groups are kept (`groups.py`), was read in this
one and may be otherwise in the next."""


def check_megatron() -> None:
    """
    Raises `UsageError` where megatron-core is missing, or is another one.
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
            f"the adaptor megatron was written for megatron-core {KNOWN}, and {version} is installed: what it "
            f"replaces may be otherwise there. Install 'megatron-core>={KNOWN},<0.17'"
        )
