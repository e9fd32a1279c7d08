"""
A helper for plugins that add options to `tft run` which only the controller uses.
"""

from collections.abc import Mapping
from typing import Any

from tft.errors import UsageError


def starts_controller(
    options: Mapping[str, Any],  # Any: the options of the command line have values of several types
    option: str,
    setting: str,
) -> bool:
    """
    Return True if this `tft run` starts the controller, which uses the option `option`. On the
    other nodes of the job the option has no effect. `options` are the options that the hook
    `tft_environment` gets.

    Raises `UsageError` if `tft lead` runs the controller. The error tells the user to set `setting`
    (VARIABLE=VALUE) in the environment of `tft lead`.
    """
    if options["led_elsewhere"]:
        raise UsageError(
            f"{option} is for the controller, which `tft lead` runs in this job: set the "
            f"environment variable {setting} for `tft lead`, and leave {option} out here"
        )
    return bool(options["node_rank"] == 0)
