"""
Constants: the places of objects in the training function's list of arguments, and result codes.
"""

from types import SimpleNamespace

ha_constant = SimpleNamespace(
    MODEL_INDEX=1, OPTIM_INDEX=2, SCHEDULER_INDEX=3, TRAIN_DATA_INDEX=4, CONFIG_INDEX=-1,
    RET_OK=0, RET_ERROR=1, RET_NO_REBUILD=2, UCE_LOW_LEVEL=2, UCE_HIGH_LEVEL=3,
)  # fmt: skip
