"""
What torch imports late, imported early: a replacement starts while the other ranks wait, and must
not import anything once it has joined them.

Found by looking at `sys.modules` over a first step, a first move of the shard, a first checkpoint;
`tests/adaptors/test_preload.py` looks again.
"""


def preload() -> None:
    """
    Import it: 0.7 to 1 s beyond `import torch`, most of it for `torch._dynamo`.
    """
    import torch._dynamo  # noqa: F401 (the first `optimizer.step` asks it whether it is compiling)

    import tft_pytorch.checkpoints  # noqa: F401 (for its imports, 0.1 s once dynamo is there)
