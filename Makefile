PYTHON ?= python3

.PHONY: demo gpu lint test

# text in, a trained MultiHashFormer out, samples on the screen; ARGS goes to train.py. A second time it goes on
demo: .venv/installed
	.venv/bin/python prepare.py config/mhf_tiny.py
	.venv/bin/python train.py config/mhf_tiny.py --auto_resume $(ARGS)
	.venv/bin/python sample.py config/mhf_tiny.py

# the rules of pyproject.toml
lint: .venv/installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check

# all tests, two at a time; ARGS goes to pytest: make test ARGS='-k resume'
test: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs -n 2 --dist loadgroup test_mhf.py tests $(ARGS)

# what this machine's GPU does with the head's kernels and a step of 100M, and does all of it hold? Prints times, then yes
# or no, and writes gpu.json; PY=python3 takes packages that are there
PY ?= .venv/bin/python
gpu: $(if $(filter .venv/%,$(PY)),.venv/installed)
	$(PY) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no GPU that torch can use')"
	$(PY) -m study.kernels
	$(PY) bench.py config/mhf_100m.py --loss=exact --parts=train
	TRITON_INTERPRET=0 $(PY) -m pytest -rs -v tests/test_gpu.py $(ARGS) && echo yes || (echo no; exit 1)

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	touch $@
