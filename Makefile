# Two commands matter: `make run` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-everywhere mutants docs deploy format peers clean

run: .venv/ready
	$(BIN)/fedprior compare mnist-mini --algorithms fedavg,fedsparse

test: .venv/tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal src tests

# The tests in the ways in which machines differ: threads, instructions, oneDNN, a busy machine. Not in CI.
test-everywhere: .venv/tools
	$(BIN)/python scripts/test_everywhere.py $(ONLY)

# Deliberate mistakes in a copy of the sources: do the tests notice? ONLY=priors runs those of a file or pattern.
mutants: .venv/tools
	$(BIN)/python scripts/mutants.py $(ONLY)

# The site, into site/: a warning is an error. Look at it with `.venv/bin/mkdocs serve`.
docs: .venv/tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The same algorithm on real machines, all of them this one: a TLS server and three authenticated devices.
# Then the guide's own commands, and those in containers where a container engine answers.
deploy: .venv/tools
	$(BIN)/python -m fedprior.flower.deploy
	FEDPRIOR_GUIDE=1 $(BIN)/pytest tests/flower/test_guide.py tests/flower/test_containers.py

format: .venv/tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# fedprior and the simulators that benchmarks/peers.py compares it with, in an environment of their own.
peers: benchmarks/.venv/ready

benchmarks/.venv/ready: benchmarks/requirements.txt
	$(PYTHON) -m venv benchmarks/.venv
	benchmarks/.venv/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt --editable .
	@touch $@

clean:
	rm -rf .venv benchmarks/.venv runs site

# What `make run` needs. constraints.txt pins every version, torch's CPU build
# among them; the package itself asks for a range. Only the modules that a run imports are compiled, which saves half a
# minute; one run is made for that, so that the first of one's own starts at once, also where Python may not write bytecode.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedprior needs Python 3.11 or newer; say which with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[report]'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import fedprior.cli.app, fedprior.runs.start, fedprior.report.progress, torch.func'
	@touch $@

# What the tests, the deployment and an export need besides.
.venv/tools: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,hub,report,export,tensorboard,flower,privacy]'
	@touch $@
