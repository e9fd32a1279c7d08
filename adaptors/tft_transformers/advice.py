"""
What `tft run` says about a script that trains with a `Trainer` of Transformers, but does not call
`tft_transformers.prepare`.
"""

ADVICE = (
    "to make its Trainer fault tolerant, use prepare(trainer) of tft_transformers, see "
    "docs/howto/transformers.md"
)
