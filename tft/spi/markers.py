"""
The markers of the library pluggy, which mark functions as hooks of tft.
"""

import pluggy

hookspec = pluggy.HookspecMarker("tft")
"""Marks the specification of a hook."""
hookimpl = pluggy.HookimplMarker("tft")
"""Marks the function of an adaptor or a plugin that implements a hook."""
