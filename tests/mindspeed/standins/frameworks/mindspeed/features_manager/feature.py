"""
The base class of MindSpeed's features.
"""


class MindSpeedFeature:
    """
    A feature: a name, and the optimization level from which on it is active.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name
        self.optimization_level = optimization_level
