"""
The agent: one process per node. It starts the processes of the node's ranks, notices at once when
they end, and sends reports and heartbeats about them to the controller.
"""
