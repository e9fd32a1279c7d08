"""
A small Trainer for tests without a job.
"""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def trainer_with(place: Path, data: Any = (), **arguments: Any) -> Any:
    """
    Return a Trainer with some arguments.
    """
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    given = {"use_cpu": True, "report_to": "none", **arguments}
    return Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(output_dir=str(place), **given),
        train_dataset=data,
        eval_dataset=data,
    )
