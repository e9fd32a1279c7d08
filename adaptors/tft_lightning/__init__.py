"""
The adaptor for Lightning. It stands on the adaptor for PyTorch.
"""
