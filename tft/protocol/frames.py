"""
The maximum size of a message on the bus.
"""

FRAME_LIMIT = 64 * 2**20
"""
The maximum size in bytes of a frame, which is one encoded message. The largest message is `Save`,
the order to write a last checkpoint. It carries the rank-local state of ranks that cannot write
their own state: at most 512 KiB of hexadecimal for each rank, so a hundred ranks fit. The state of
models is never sent in a frame.
"""
