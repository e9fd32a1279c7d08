"""
What a feature is made of.
"""


class MindSpeedFeature:
    """
    Of a name and a level from which on it is there.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name
        self.optimization_level = optimization_level
