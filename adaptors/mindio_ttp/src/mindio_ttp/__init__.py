"""
`mindio_ttp` on tft: the functions that programs written for MindIO TFT call, with our bus, controller
and workers behind them.

`mindio_ttp.framework_ttp` is for training processes, `mindio_ttp.controller_ttp` for what manages a
cluster. What they do otherwise than MindIO is in `docs/mindio.md`.
"""

from mindio_ttp.neighbours import refuse_another

__all__: list[str] = []

refuse_another("mindio_ttp")
