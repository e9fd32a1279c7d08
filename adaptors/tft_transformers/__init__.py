"""
The adaptor for Transformers. It stands on the adaptor for PyTorch.

    import tft_transformers

    tft_transformers.init()  # before TrainingArguments are made
    trainer = tft_transformers.prepare(Trainer(...))
    trainer.train()
"""

from tft_transformers.joining import init, prepare

__all__ = ["init", "prepare"]
