"""
The adaptor for Transformers. It makes a `Trainer` fault tolerant, and uses the adaptor for PyTorch.
A script calls it like this:

    import tft_transformers

    tft_transformers.init()  # before TrainingArguments are made
    trainer = tft_transformers.prepare(Trainer(...))
    trainer.train()
"""

from tft_transformers.joining import init, prepare

__all__ = ["init", "prepare"]
