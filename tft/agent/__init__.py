"""
The agent: one per node. It starts the node's ranks, sees them end at once, and speaks for them.
"""
