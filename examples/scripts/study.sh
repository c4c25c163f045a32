#!/usr/bin/env bash
# A study: methods against each other on several seeds, with intervals and verdicts (docs/science.md).
#
#   bash examples/scripts/study.sh configs/studies/NAME.yaml [--workers N] [--device cuda] [--only CELL ...] [--plan]
#                                   [--probe CELL]
#
#   smoke        a few minutes on two cores: that the runner works; too small to say anything of methods
#   claims       about four hours on two cores: what the papers claim
#   ablations    a night: which part of a method does what
#   gpu          the entropy papers' contrasts with more seeds, for one GPU
#
# The same command goes on where it was ended, killed or not. Results: runs/studies/NAME/study.html, table.md, cells.csv,
# runs.jsonl and figures.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
cd "$ROOT"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$VENV_PYTHON" -m openrlhf_ext.cli.study "$@"
