"""
A stand-in for MindSpeed-LLM's high availability, used when its files are not available.

It calls `mindio_ttp` in the same order, with the same argument lists, and forms groups in the same
ways. It keeps two replicas of the optimizer's state.
"""
