"""
The protocol of a job: the messages between the job's processes, and their encoding as bytes.
"""
