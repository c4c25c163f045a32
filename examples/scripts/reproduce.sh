#!/usr/bin/env bash
# A figure or a table of a paper (docs/papers.md): its runs on the toy policy or on a small real model, or the commands of
# a cluster.
#
#   bash examples/scripts/reproduce.sh --list
#   bash examples/scripts/reproduce.sh PAPER ITEM [--scale toy|real|paper] [--seeds N] [--steps N] [--workers N]
#
#   toy      every run with its method and ablation on the toy policy: minutes on two cores; the picture, and a table of
#            the last numbers, are in runs/papers/PAPER. It shows that a figure's path works, not what the paper found.
#   real     the same runs on SmolLM2-135M-Instruct and the task of real_model.sh, by the whole stack, one after the
#            other (--steps of each, 20 if not given); OPENRLHF_EXT_CACHE has the model, 630 MB
#   paper    prints the commands that train, evaluate and report with the paper's models
#
# The same command goes on where it was ended, killed or not.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
cd "$ROOT"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV_PYTHON" -m benchmarks.reproduce "$@"
