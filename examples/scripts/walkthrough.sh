#!/usr/bin/env bash
# Everything between an empty checkout and a run that survives the loss of a node, in 30 minutes on two cores.
#
#   bash examples/scripts/walkthrough.sh
#
# What this machine has; what a 32B run needs on 64 H100, and its dry run; a toy run over two local Ray nodes, one of
# which is killed in the middle and joins again, and then the driver; its report; how good the trained checkpoint is.
#
# Variables that you may set:
#   WALKTHROUGH_DIR      where results go; run/ in it is made anew   (default: runs/walkthrough in the checkout)

set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
cd "$ROOT"

OUT=$(realpath -m "${WALKTHROUGH_DIR:-runs/walkthrough}")
RECIPE=qwen2.5_32b_gtpo_entropy
MODEL=configs/models/qwen2.5-32b # config.json only: weights are needed by the run itself, not by its plan
RESTARTS=2                       # the killed node's end may be seen twice: by a rank, and by Ray
VICTIM=127.0.0.2
WAIT_S=600
export OPENRLHF_EXT_VENV=${VENV_PYTHON%/bin/python}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$OUT"
rm -rf "$OUT/run"
started=$SECONDS

say() { printf '\n== %s min %02d: %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$*"; }
module() { "$VENV_PYTHON" -m "openrlhf_ext.cli.$1" "${@:2}"; }

say "doctor: what this environment can do"
module doctor

say "toy policy: a model of a million parameters and its arithmetic problems"
"$VENV_PYTHON" examples/python/toy_policy.py --output_dir "$OUT/warm_start" --data_dir "$OUT/data"

say "plan: $RECIPE on 64 H100, from the model's config.json"
module plan --config "configs/recipes/$RECIPE.yaml" --actor.model_name_or_path "$MODEL" --gpus 64 --gpu H100 \
    --write "$OUT/layout.yaml"

say "dry run: the recipe with that layout; every rank is built without its weights"
module train_ppo_ray --config "configs/recipes/$RECIPE.yaml" --config "$OUT/layout.yaml" --actor.model_name_or_path "$MODEL" \
    --data.prompt_dataset "$OUT/data/train.jsonl" --data.input_key question --data.label_key answer \
    --reward.remote_url examples/python/reward_arithmetic.py --dry_run

# kill_9 STEP NODE WORD: once that checkpoint is there, SIGKILL to the processes of a node whose command has this word.
kill_9() {
    local deadline=$((SECONDS + WAIT_S)) file pids=()
    until [[ -d $OUT/run/checkpoints/global_step$1 ]]; do
        ((SECONDS < deadline)) || { echo "no checkpoint of step $1 after $WAIT_S s" >&2 && return 1; }
        sleep 0.1
    done
    while read -r file; do
        if grep -qsz "^NODE_NAME=$2\$" "$file" && grep -qs "$3" "${file%environ}cmdline"; then
            pids+=("$(cut -d / -f 3 <<<"$file")")
        fi
    done < <(grep -lsz "^RUN_FOLDER=$OUT/run\$" /proc/[0-9]*/environ)
    ((${#pids[@]})) || { echo "no process of node $2 to kill" >&2 && return 1; }
    printf '\n== walkthrough: kill -9 of %s processes of node %s\n\n' "${#pids[@]}" "$2"
    kill -KILL "${pids[@]}"
}

say "two Ray nodes on this machine, a policy rank on each; one dies in the second step, the driver in the third"
{ kill_9 1 "$VICTIM" . && kill_9 2 127.0.0.1 train_ppo_ray; } &
killer=$!
trap 'kill "$killer" 2>/dev/null || true' EXIT # a run that failed before must not lose processes of the next one
bash examples/scripts/local_recipe.sh 2 smoke_cpu "$OUT/warm_start" "$OUT/data/train.jsonl" \
    examples/python/reward_arithmetic.py --actor.num_nodes 2 --actor.num_gpus_per_node 1 \
    --train.max_restarts "$RESTARTS" --ckpt.output_dir "$OUT/run" --ckpt.path "$OUT/run/checkpoints"
wait "$killer"
grep -q '"event": "restart"' "$OUT/run/events.jsonl" || { echo "the run did not notice the loss of a node" >&2 && exit 1; }

say "report: curves, the restart, some completions"
module report "$OUT/run" --output "$OUT/report.html"

say "evaluation: the trained checkpoint on held-out problems, with vLLM"
module evaluate --model "$OUT/run" --data "$OUT/data/heldout.jsonl" --reward examples/python/reward_arithmetic.py \
    --engine vllm --limit 128 --n 4 --k 1 4 --max_new_tokens 48 --kv_cache_mib 128 --json "$OUT/evaluation.json"

say "done"
cat <<TEXT
layout       $OUT/layout.yaml
run          $OUT/run   (events.jsonl, metrics.jsonl, samples.jsonl, logs/)
report       $OUT/report.html   (open it in a browser; docs/report.md)
evaluation   $OUT/evaluation.json
TEXT
