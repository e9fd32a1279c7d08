"""
The contract suite, run on the adaptors of this repository.
"""

from tests.contract.trainings import FakeTraining, TorchTraining
from tft.testing.contract import AdaptorContract


class TestFake(AdaptorContract):
    """
    The contract of the fake adaptor, which has no framework.
    """

    training = FakeTraining


class TestTorch(AdaptorContract):
    """
    The contract of the adaptor for PyTorch.
    """

    training = TorchTraining
