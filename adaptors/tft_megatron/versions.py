"""
Checks that the installed megatron-core has the version for which this adaptor was written.
"""

from tft_pytorch.versions import KnownVersions

# Other versions are refused, because `method_hooks.py` replaces methods of megatron-core's objects,
# and `groups.py` uses the variables in which megatron-core stores its process groups.
MEGATRON = KnownVersions(
    adaptor="megatron", package="megatron-core", oldest="0.16", unknown="0.17",
    differs="in which the methods that tft replaces may differ",
)  # fmt: skip


def check_megatron() -> None:
    """
    Import megatron-core. Raise `UsageError` if it is missing or has another version.
    """
    try:
        import megatron.core
    except ImportError as error:
        raise MEGATRON.missing(f"which cannot be imported ({error})") from None
    # read the version from the module: as part of Megatron-LM, megatron-core is only source code,
    # and no package of it is installed
    MEGATRON.check(megatron.core.__version__)
