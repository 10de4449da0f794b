PYTHON ?= python3

.PHONY: demo gpu lint test

# Prepares data, trains a small model and samples from it; rerunning resumes. ARGS goes to train.py:
# make demo ARGS='--max_steps=100'
demo: .venv/installed
	.venv/bin/python prepare.py config/mhf_tiny.py
	.venv/bin/python train.py config/mhf_tiny.py $(ARGS)
	.venv/bin/python sample.py config/mhf_tiny.py

# Checks style and formatting.
lint: .venv/installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check

# Runs all tests, two files at a time. ARGS goes to pytest: make test ARGS='-k resume'
test: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs -n 2 --dist loadfile test_mhf.py tests $(ARGS)

# Benchmarks this GPU (training steps of 100M with a vocabulary of 32K and 131K and of d=256; generation; P(w)), runs the
# GPU tests, and prints whether they pass. PY=python3 uses installed packages instead of .venv.
PY ?= .venv/bin/python
gpu: $(if $(filter .venv/%,$(PY)),.venv/installed)
	$(PY) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no GPU that torch can use')"
	$(PY) bench.py config/mhf_100m.py
	$(PY) bench.py config/mhf_100m.py --benchmarks=train --variants=exact,Standard --tokenizer=tekken
	$(PY) bench.py config/mhf_tiny.py --benchmarks=train --variants=exact --micro_batch_size=32 --num_hashes=4 --num_buckets=7966
	TRITON_INTERPRET=0 $(PY) -m pytest -rs -v -n 8 --dist worksteal tests/test_gpu.py $(ARGS) && echo yes || (echo no; exit 1)

.venv/installed: requirements.txt
	test -d .venv || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	touch $@
