"""
The adaptors of this repository keep the contract of an adaptor.
"""

from tests.contract.trainings import FakeTraining, TorchTraining
from tft.testing.contract import AdaptorContract


class TestFake(AdaptorContract):
    """
    The adaptor without a framework.
    """

    training = FakeTraining


class TestTorch(AdaptorContract):
    """
    The adaptor for PyTorch.
    """

    training = TorchTraining
