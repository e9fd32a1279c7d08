"""
Rules for processes that communicate over a lossy bus: delivery of reports, leadership of a
controller (leases), hang detection, the comparison of the copies of a shard by their digests, and
the copies of rank-local state on other nodes.
"""
