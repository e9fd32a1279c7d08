"""
Shards moved from rank to rank: in chunks, digested, from several sources at once, over TCP,
plain or encrypted.

No process group takes part, so that repair need not wait for one. A rank serves what it holds
with a `ShardServer`; whoever lacks a shard gets it with `fetch`.
"""

from tft.transfer.client import fetch
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls

__all__ = ["ShardServer", "Tls", "fetch", "read_tls"]
