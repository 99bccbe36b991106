# Every target works in a fresh clone: the environment is made on first use.
VENV := .venv/bin
export OMP_NUM_THREADS ?= 1
export MUJOCO_GL ?= $(if $(filter Linux,$(shell uname -s)),egl,glfw)
export HF_HUB_OFFLINE ?= 1
QUICK := tests/test_contracts.py tests/test_registry.py tests/test_schema.py \
  tests/test_statistics.py tests/test_intervention.py tests/runtime/test_executor.py tests/runtime/test_timeline.py \
  tests/runtime/test_safety.py tests/policies/test_flow.py tests/rollout/test_engine.py tests/methods/test_replay_buffer.py

.PHONY: help bootstrap demo test test-newest check readme examples tutorials lint results docs reproduce stale lock clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

bootstrap:  ## make .venv and install what is missing
	@tools/bootstrap

demo: bootstrap  ## collect, train, serve, run 50 episodes, write outputs/demo/report.html
	$(VENV)/vla demo --out outputs/demo

test: bootstrap  ## all tests: unit, contract, end to end
	$(VENV)/python -m pytest -n 2 --dist worksteal

check: bootstrap  ## lint, types, contracts and quick tests: two minutes
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/lint-imports
	$(VENV)/python -m pytest -n 2 --dist worksteal $(QUICK)

test-newest: bootstrap  ## quick tests with the newest releases, whatever the upper bounds say, in .venv-newest
	$(VENV)/python -m venv .venv-newest
	$(VENV)/python tools/newest.py > .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check --upgrade -r .venv-newest/requirements.txt
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal $(QUICK)

readme: bootstrap  ## run every command of the README's table, shortened, in a temporary folder
	$(VENV)/python tools/readme.py

examples: bootstrap  ## run the examples of every verb's help likewise
	$(VENV)/python tools/examples.py

tutorials: bootstrap  ## run the tutorials in full and write what they print, and their pictures, back into their pages
	$(VENV)/python tools/tutorials.py

lint: bootstrap  ## format, lint, types and import contracts
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .
	$(VENV)/mypy
	$(VENV)/lint-imports

results: bootstrap  ## print all checks of docs/results and rebuild docs/results.md
	$(VENV)/python tools/results.py

reproduce: bootstrap  ## measure one result file again: make reproduce NAME=shipped
	$(VENV)/python tools/freshness.py --run $(NAME)

stale: bootstrap  ## list the result files whose code or inputs have changed since
	$(VENV)/python tools/freshness.py

docs: bootstrap  ## build the site of docs/ into site/, strictly
	$(VENV)/python -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=0.26"
	.venv-docs/bin/mkdocs build --quiet --strict

lock:  ## resolve requirements.lock again (needs uv)
	uv pip compile pyproject.toml --extra train --extra robot --extra hardware --extra console --extra viz \
	  --extra scale --extra sim-extra --extra dev --universal --python-version 3.12 --generate-hashes \
	  --no-header --no-emit-index-url --no-emit-find-links -q -o requirements.lock

clean:  ## remove caches and outputs, keep .venv
	rm -rf outputs runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
