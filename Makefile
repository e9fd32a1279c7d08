# Two front doors, on a machine with only Python and make: `make demo` and `make test`.
# Each makes .venv and installs what it needs; the second time it finds both there.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
INSTALLED := .venv/.installed

# Without its bytecode, each process of a job would compile all modules of tft again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo megatron-demo unit test check test-mindspore test-megatron test-mindspeed test-lightning test-transformers test-torchtitan test-accelerator soak mutate bench bench-peers docs format clean

demo: $(INSTALLED)
	.venv/bin/python examples/gpt/demo.py

megatron-demo: $(INSTALLED)
	.venv/bin/python examples/gpt/demo.py --megatron

# What needs no training process, in about a minute.
unit: $(INSTALLED)
	scripts/unit

# What "done" means, and what CI runs: format, lint, types, walls between rooms, tests.
test check: $(INSTALLED)
	scripts/check

# A part of it: real MindSpore, in an environment of its own, `.venv-mindspore`.
test-mindspore:
	PYTHON=$(PYTHON) scripts/framework mindspore

# Another part: real megatron-core, on CPUs.
test-megatron: $(INSTALLED)
	.venv/bin/python -m pytest tests/megatron -m "not soak"

# Another part: MindSpeed-LLM's high availability, in an environment of its own, `.venv-mindspeed`.
test-mindspeed:
	PYTHON=$(PYTHON) scripts/mindspeed

# Other parts: the adaptors for training loops, each in an environment of its own, such as `.venv-lightning`.
test-lightning test-transformers test-torchtitan:
	PYTHON=$(PYTHON) scripts/framework $(@:test-%=%)

# On a machine with a GPU or an NPU: jobs on the real device. Exits with 5 where there is none.
test-accelerator: $(INSTALLED)
	scripts/accelerator

soak: $(INSTALLED)
	.venv/bin/python -m pytest -m soak
	PYTHON=$(PYTHON) scripts/framework mindspore -m soak
	PYTHON=$(PYTHON) scripts/mindspeed -m soak
	PYTHON=$(PYTHON) scripts/framework lightning -m soak
	PYTHON=$(PYTHON) scripts/framework transformers -m soak
	PYTHON=$(PYTHON) scripts/framework torchtitan -m soak

mutate: $(INSTALLED)
	scripts/mutate

bench: $(INSTALLED)
	scripts/bench

# Other systems beside tft, with the same model and loop, in an environment of their own: `.venv-peers`.
bench-peers:
	PYTHON=$(PYTHON) scripts/peers

# The pages of docs/ as a site, site/index.html, in an environment of its own: `.venv-docs`.
docs:
	PYTHON=$(PYTHON) scripts/site
	@echo "The site begins at site/index.html."

format: $(INSTALLED)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-mindspore .venv-mindspeed .venv-peers .venv-docs .venv-lightning .venv-transformers .venv-torchtitan site

# The group is read out of pyproject.toml: a Python 3.11 brings a pip that cannot do that yet.
$(INSTALLED): pyproject.toml adaptors/mindio_ttp/pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python scripts/group dev > .venv/dev.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv/dev.txt --editable . --editable adaptors/mindio_ttp
	touch $@
