#!/usr/bin/env bash
# Trains with a recipe of configs/recipes on the Ray cluster that RAY_ADDRESS names, or on this node alone without it.
#
#   bash examples/scripts/train_recipe.sh RECIPE MODEL DATA REWARD [--entity.name value ...]
#
#   RECIPE   name of a file in configs/recipes, without .yaml
#   MODEL    folder of a Hugging Face checkpoint; on several nodes on storage that all of them see
#   DATA     prompts: a .jsonl file with the keys question and answer (other keys: --data.input_key, --data.label_key)
#   REWARD   Python file with reward_func, such as examples/python/reward_gsm8k.py
#
# Checks first, without GPUs, Ray or weights (a config.json is enough): the same with --dry_run behind it.
# docs/cluster.md leads from empty nodes to a running job.

set -euo pipefail

usage() {
    sed -n '4,9s/^# \{0,1\}//p' "$0" >&2
    echo "recipes: $(ls "$ROOT/configs/recipes" | sed 's/\.yaml$//' | paste -sd ' ')" >&2
    exit 2
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
(($# >= 4)) || usage
recipe=$ROOT/configs/recipes/$1.yaml model=$2 data=$3 reward=$4
[[ -f $recipe ]] || usage
shift 4

# the environment of this checkout, or the one that is active
python=${OPENRLHF_EXT_VENV:-$ROOT/.venv}/bin/python
[[ -x $python ]] || python=python

export TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
exec "$python" -m openrlhf_ext.cli.train_ppo_ray --config "$recipe" \
    --actor.model_name_or_path "$model" --data.prompt_dataset "$data" --reward.remote_url "$reward" "$@"
