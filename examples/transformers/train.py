"""
The same as `plain.py`, and it survives the loss of processes. Start it with

    tft run --nproc-per-node 2 --adaptor transformers examples/transformers/train.py
"""

import argparse

import tft_transformers
from tokens import Tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--output", default="output")
options = parser.parse_args()
tft_transformers.init()

set_seed(1)
args = TrainingArguments(
    output_dir=options.output,
    use_cpu=True,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=20,
    save_steps=20,
    report_to="none",
)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=Tokens(200, seed=1),
    eval_dataset=Tokens(40, seed=2),
)
tft_transformers.prepare(trainer).train()
