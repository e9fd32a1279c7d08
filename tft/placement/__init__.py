"""
Derives shard groups from the sizes of a job's parallelism, with their redundancy and memory cost.
"""
