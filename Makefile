# `make demo` runs the main job, `make test` the tests; both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Packages are installed without bytecode: every process that tests, notebooks and the demo start would compile
# torch again, for 6 s, where the shell forbids to keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo docs notebooks rivals gpu test tests test-all lint clean

setup: $(READY)

# torch first and pinned: the rest then accepts it instead of pulling another build. Modules are compiled
# when they are first imported, and most never are. Torchao lies apart: where it is installed, transformers
# imports it in each process, for 4 s; bitsandbytes is for one test.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt torch numpy
	$(BIN)/pip install -q --no-compile -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-compile --no-deps -c constraints.txt --target .venv/apart torchao bitsandbytes
	touch $(READY)

# MINUTES=0 leaves the profiling out, MINUTES=5 measures more blocks.
demo: $(READY)
	$(BIN)/python -m meshwright.demo $(if $(MINUTES),--minutes $(MINUTES))

# The docs as a site, build/site: open its index.html, or serve it (`python -m http.server -d build/site`) to search in it.
docs: $(READY)
	$(BIN)/mkdocs build -q

# Executes the notebooks anew and keeps their outputs.
notebooks: $(READY)
	$(BIN)/python notebooks/run.py

# Torchrec, for `python -m benchmarks.embrace`. By itself it asks for 2.7 GB of GPU kernels of another version,
# under the name of the CPU's, and for a torchmetrics of 2023.
rivals: $(READY)
	$(BIN)/pip install -q --no-compile --no-deps -c constraints.txt \
	    torchrec fbgemm-gpu-cpu tensordict pyre-extensions typing-inspect pyvers

# On a machine with a GPU, in under ten minutes, with the Python that has torch there: nothing is installed. Before:
# `python -m benchmarks.gpu --prepare` (plans) and `--needs` (packages that it lacks), both to be carried along.
gpu:
	$(PYTHON) -m benchmarks.gpu --out $(or $(OUT),runs/gpu)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Types are checked, on one core, while the tests run.
test: $(READY)
	$(MAKE) --no-print-directory -j2 lint tests

tests: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal --durations 20

# What is marked `slow`, and every case of what is marked `sampled`, of which a third runs otherwise.
test-all: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal --durations 20 --all-cases

clean:
	rm -rf .venv demo-run
