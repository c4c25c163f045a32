#!/usr/bin/env bash
# A study: methods against each other on several seeds, with intervals and verdicts (docs/science.md).
#
#   bash examples/scripts/study.sh configs/studies/NAME.yaml [--workers N] [--device cuda] [--only CELL ...] [--plan]
#                                   [--probe CELL]
#
#   smoke        that the runner works; too small to say anything of methods
#   claims       what the papers claim: hours on two cores
#   real_model   four of these claims on SmolLM2-135M-Instruct, by the whole stack: nine hours on two cores
#   mechanism    why two of them failed on a toy, predictions first: eight hours on two cores
#   ablations    which part of a method does what: longer than claims
#   gpu          the entropy papers' contrasts with more seeds, for one GPU
#
# --plan times a short trial and says how many minutes a study takes on this machine.
#
# The same command goes on where it was ended, killed or not. Results: runs/studies/NAME/study.html, table.md, cells.csv,
# runs.jsonl and figures.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
cd "$ROOT"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$VENV_PYTHON" -m benchmarks.study "$@"
