"""
What `tft run` says about a script with Lightning that does not use `TftStrategy`.
"""

ADVICE = (
    "to make it fault tolerant, give the Trainer strategy=TftStrategy() of tft_lightning, see "
    "docs/howto/lightning.md"
)
