"""
From the sizes of parallelism to shard groups: redundancy and memory cost.
"""
