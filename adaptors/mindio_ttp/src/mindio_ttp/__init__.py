"""
A replacement for the package `mindio_ttp` of MindIO TFT, a library for fault-tolerant training.
This package has the same functions, so that programs written for MindIO TFT run with tft.

tft's bus, controller and workers do the work of these functions. The subpackage `framework_ttp` is
for training processes. The subpackage `controller_ttp` is for the manager of a cluster. The
differences from MindIO are described in `docs/reference/mindio_differences.md`.
"""

from mindio_ttp.package_conflicts import refuse_another

__all__: list[str] = []

refuse_another("mindio_ttp")
