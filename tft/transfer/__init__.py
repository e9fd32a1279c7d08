"""
The transfer of shards from rank to rank. A shard is moved in chunks with digests, from several
sources at once, over TCP, plain or encrypted.

No process group takes part, so a repair need not wait for a process group. A rank serves its shards
with a `ShardServer`. A rank that lacks a shard gets the shard with `fetch`.
"""

from tft.transfer.client import Receiver, fetch
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls

__all__ = ["Receiver", "ShardServer", "Tls", "fetch", "read_tls"]
