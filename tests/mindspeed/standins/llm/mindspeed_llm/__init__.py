"""
A stand-in for MindSpeed-LLM's high availability, where its files are not at hand: it calls `mindio_ttp` in the same
order, has the same argument lists, forms groups in the same ways, and keeps two replicas of the optimizer's state.
"""
