"""
Shards moved from rank to rank: in chunks, digested, from several sources at once, over plain TCP.

No process group takes part, so that repair need not wait for one. A rank serves what it holds
with a `ShardServer`; whoever lacks a shard gets it with `fetch`.
"""

from tft.transfer.client import fetch
from tft.transfer.server import ShardServer

__all__ = ["ShardServer", "fetch"]
