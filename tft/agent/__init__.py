"""
The agent: one process per node. The agent starts the processes of the node's ranks, notices at once
when such a process ends, and sends reports and heartbeats about the ranks to the controller.
"""
