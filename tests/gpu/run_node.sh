#!/usr/bin/env bash
# First contact with a node of 1 to 8 GPUs on which everything is installed (docs/cluster.md): every part of the stack
# once, on tiny models, each step with a limit and a log file of its own.
#
#   bash tests/gpu/run_node.sh [--out FOLDER] [--only STEP ...] [--model FOLDER] [--cpu]
#
# Please send in FOLDER/results.md (default runs/node), and the logs of the steps that failed. Exit status 0: some step
# passed and none failed. --cpu tries the script itself: tiny, without GPUs. PYTHON names another environment's Python.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-${OPENRLHF_EXT_VENV:-.venv}/bin/python}
[[ -x $(command -v "$python") ]] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=disabled PYTHONUNBUFFERED=1
# shellcheck source=examples/scripts/cuda_queues.sh
source examples/scripts/cuda_queues.sh
exec "$python" -m tests.gpu.node "$@"
