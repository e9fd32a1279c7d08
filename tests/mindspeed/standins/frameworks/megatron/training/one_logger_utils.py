"""
Metrics that go nowhere.
"""


def track_app_tag(batch_size: int, world_size: int, seq_length: int) -> None:
    """
    Nobody collects these.
    """
