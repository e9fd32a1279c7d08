"""
The adaptor for Transformers. It stands on the adaptor for PyTorch.
"""
