#!/usr/bin/env bash
# Sets up the environment, then lints, checks the types and tests; tests/test_unused.py looks for dead code.
#
#   bash tests/run.sh               # all tests but those that have passed on the same code (tests/selection.py)
#   bash tests/run.sh --all         # all tests; records what has passed in tests/passed.json: commit it
#   bash tests/run.sh -k megatron   # other arguments are passed on to pytest
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/scripts/setup_env.sh"
setup_env dev

# One thread for each process: the tests start several processes on few cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Every process compiles what has no bytecode: without any, a policy rank takes 7.0 instead of 4.5 s of a core to import.
unset PYTHONDONTWRITEBYTECODE
# The tests use local files only.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=disabled

cd "$ROOT"
"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check --quiet .
"$VENV_PYTHON" -m mypy & # 80 s of one core without a cache: beside the tests
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
if (($# > 0)) && [[ $1 != --all ]]; then
    "$VENV_PYTHON" -m pytest "$@"
    wait "$types"
    exit
fi
digests=$("$VENV_PYTHON" -m tests.selection --now) # before the tests: files may change while they run
left_out=()
if (($# == 0)); then
    passed=$("$VENV_PYTHON" -m tests.selection)
    if [[ -n $passed ]]; then
        mapfile -t left_out <<< "$passed"
        printf 'left out, passed on the same code: %s\n' "${left_out[@]#--deselect=}"
    fi
fi
# Starting processes is most of the work and leaves a core idle half of the time: two files at once, whole jobs first,
# and files of ranks one after the other (tests/conftest.py).
# A worker that dies ends the run: with a new one in its place pytest-xdist 3.8 may wait for ever.
"$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10 "${left_out[@]}"
# Triton stays out of the other tests' environment, see requirements/triton.lock.
PYTHONPATH="$VENV/triton" "$VENV_PYTHON" -m pytest tests/head/test_triton.py tests/rollout/test_triton_sums.py
wait "$types"
printf '%s\n' "$digests" > tests/passed.json
