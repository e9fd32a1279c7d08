"""
MindSpeed's groups beside Megatron's: none is made here.
"""

_PIPELINE_MODEL_PARALLEL_GROUP_FOR_NEW_STREAM = None
