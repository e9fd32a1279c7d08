"""
A replacement for the package `mindio_ttp` of MindIO TFT. It has the same functions, so that
programs which are written for MindIO TFT run with tft.

tft's bus, controller and workers do the work of these functions. `mindio_ttp.framework_ttp` is for
training processes, `mindio_ttp.controller_ttp` for the manager of a cluster. The differences from
MindIO are in `docs/reference/mindio_differences.md`.
"""

from mindio_ttp.package_conflicts import refuse_another

__all__: list[str] = []

refuse_another("mindio_ttp")
