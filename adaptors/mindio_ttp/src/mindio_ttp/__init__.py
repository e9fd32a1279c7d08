"""
`mindio_ttp` on tft: the functions that programs written for MindIO TFT call.

tft's bus, controller and workers carry them out. `mindio_ttp.framework_ttp` is for training
processes, `mindio_ttp.controller_ttp` for the manager of a cluster. The differences from MindIO are
in `docs/reference/mindio_differences.md`.
"""

from mindio_ttp.package_conflicts import refuse_another

__all__: list[str] = []

refuse_another("mindio_ttp")
