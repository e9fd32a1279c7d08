"""
Rules for processes that communicate over a bus that loses messages. There are rules for the
delivery of reports, for the leadership among controllers (leases), and for hang detection. Other
rules compare the copies of a shard by their digests, or copy rank-local state to other nodes.
"""
