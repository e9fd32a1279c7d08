"""
A placeholder for MindSpeed's additional process groups; the stand-in makes none.
"""

_PIPELINE_MODEL_PARALLEL_GROUP_FOR_NEW_STREAM = None
