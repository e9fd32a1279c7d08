"""
What `tft run` says about a script with TorchTitan that does not use `tft_torchtitan`.
"""

ADVICE = (
    "to make it fault tolerant, call main() or train(config) of tft_torchtitan, see "
    "docs/howto/torchtitan.md"
)
