"""
The adaptor for TorchTitan. It stands on the adaptor for PyTorch.
"""
