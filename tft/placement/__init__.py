"""
Computes from the sizes of a job's parallelism, before anything runs, which ranks hold which shard.
Also computes which losses the job survives, and how much memory the copies take.
"""
