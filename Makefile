PYTHON ?= python3

.PHONY: demo gpu lint test

# Prepares data, trains a small model and samples from it; rerunning resumes. ARGS goes to train.py:
# make demo ARGS='--max_steps=100'
demo: .venv/installed
	.venv/bin/python prepare.py config/mhf_tiny.py
	.venv/bin/python train.py config/mhf_tiny.py --auto_resume $(ARGS)
	.venv/bin/python sample.py config/mhf_tiny.py

# Checks style and formatting.
lint: .venv/installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check

# Runs all tests, two at a time. ARGS goes to pytest: make test ARGS='-k resume'
test: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs -n 2 --dist loadgroup test_mhf.py tests $(ARGS)

# Benchmarks this GPU (the head's kernels, a training step of 100M), runs the GPU tests, and prints whether they pass.
# PY=python3 uses installed packages instead of .venv.
PY ?= .venv/bin/python
gpu: $(if $(filter .venv/%,$(PY)),.venv/installed)
	$(PY) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no GPU that torch can use')"
	$(PY) -m study.kernels
	$(PY) bench.py config/mhf_100m.py --variants=exact,Standard --benchmarks=train
	TRITON_INTERPRET=0 $(PY) -m pytest -rs -v tests/test_gpu.py $(ARGS) && echo yes || (echo no; exit 1)

.venv/installed: requirements.txt
	test -d .venv || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	touch $@
