"""
The transfer of shards (pieces of training state) from rank to rank.

A shard is moved in chunks, each with a digest, from several source ranks (ranks that hold a copy of
the shard) at once. The chunks travel over TCP, plain or encrypted. A transfer uses no process
group, so it works while the process groups are broken.

A rank that holds shards serves them with a `ShardServer`. A rank that has lost its copy of a shard
reads a new copy with `fetch`.
"""

from tft.transfer.client import Receiver, fetch
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls

__all__ = ["Receiver", "ShardServer", "Tls", "fetch", "read_tls"]
