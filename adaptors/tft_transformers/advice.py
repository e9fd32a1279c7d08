"""
What `tft run` says about a script with a Trainer that was not prepared.
"""

ADVICE = (
    "to make its Trainer fault tolerant, use prepare(trainer) of tft_transformers, see "
    "docs/howto/transformers.md"
)
