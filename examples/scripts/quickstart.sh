#!/usr/bin/env bash
# The whole stack on a laptop: a toy policy learns arithmetic by reinforcement learning, in a few minutes on two cores.
#
#   bash examples/scripts/quickstart.sh [--entity.name value ...]
#
# OpenRLHF's controller on Ray, a Megatron-core policy on two data-parallel ranks, rollouts from vLLM, and
# rewards shaped by token entropy (gtpo_entropy). Everything after the script's name goes to the training command, so
# other layouts are one option away:
#
#   bash examples/scripts/quickstart.sh --megatron.tensor_parallel_size 2
#   bash examples/scripts/quickstart.sh --megatron.pipeline_parallel_size 2
#   bash examples/scripts/quickstart.sh --train.max_staleness 1                  # sample while the policy trains
#   bash examples/scripts/quickstart.sh --train.exact_rollout_enable             # policy = engine, to the last bit
#
# Variables that you may set:
#   QUICKSTART_DIR       where results go                          (default: runs/quickstart in the checkout)
#   QUICKSTART_PROMPTS   training prompts, 32 of them a step       (default: 1280)
#   QUICKSTART_MIN_GAIN  accuracy it must gain, as a fraction      (default: 0.15)

set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
cd "$ROOT"

OUT=$(realpath -m "${QUICKSTART_DIR:-runs/quickstart}")
REWARD=$ROOT/examples/python/reward_arithmetic.py
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$OUT"
started=$SECONDS

say() { printf '\n== %s\n' "$*"; }

# evaluate CHECKPOINT RESULT.json [option ...]: sampled accuracy with plain transformers
evaluate() {
    "$VENV_PYTHON" -m openrlhf_ext.cli.evaluate --model "$1" --json "$2" --data "$OUT/data/heldout.jsonl" \
        --reward "$REWARD" --n_samples 2 --max_new_tokens 48 "${@:3}"
}

say "toy policy: a million parameters, fine-tuned (train_sft) on a careful teacher's answers, then on a careless one's (two
   steps in five are wrong, so that its loss stays high): it is right in a third of its answers, and reinforcement learning
   has something to do"
"$VENV_PYTHON" examples/python/toy_policy.py --output_dir "$OUT/warm_start" --data_dir "$OUT/data"

say "before: the held-out problems with plain transformers. Here, above and in the training's step 0 the same policy is
   measured, each time on other random samples: the numbers differ by a few standard errors at most"
evaluate "$OUT/warm_start" "$OUT/before.json"

say "reinforcement learning: gtpo_entropy on Megatron ranks and two vLLM engines"
"$VENV_PYTHON" -m openrlhf_ext.cli.train_ppo_ray --config configs/quickstart.yaml \
    --actor.model_name_or_path "$OUT/warm_start" \
    --data.prompt_dataset "$OUT/data/train.jsonl" --data.max_samples "${QUICKSTART_PROMPTS:-1280}" \
    --eval.dataset "$OUT/data/heldout.jsonl" \
    --reward.remote_url "$REWARD" \
    --ckpt.output_dir "$OUT/policy" \
    --logger.metrics_path "$OUT/metrics.jsonl" --logger.figure_path "$OUT/training.png" \
    --logger.tensorboard_dir "$OUT/tensorboard" "$@"

say "after: the final checkpoint in plain transformers must agree with what the engine sampled"
last_evaluation=$("$VENV_PYTHON" - "$OUT/metrics.jsonl" <<'PY'
import sys
from openrlhf_ext.reporting import read_metrics

last = [r for r in read_metrics(sys.argv[1]) if "eval/accuracy" in r][-1]
print(last["eval/accuracy"], last["eval/accuracy_stderr"])
PY
)
read -r accuracy error <<<"$last_evaluation"
verdict=0  # said above the report, and the script's status in the end
evaluate "$OUT/policy" "$OUT/after.json" --compare "$OUT/before.json" --min_gain "${QUICKSTART_MIN_GAIN:-0.15}" \
    --expect_accuracy "$accuracy" --expect_stderr "$error" || verdict=$?

say "report: every curve, event and some completions on one page"
"$VENV_PYTHON" -m openrlhf_ext.cli.report "$OUT" --output "$OUT/report.html"

say "done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s"
cat <<TEXT
report       $OUT/report.html   (open it in a browser; docs/report.md)
checkpoint   $OUT/policy
figure       $OUT/training.png
metrics      $OUT/metrics.jsonl   (names: docs/reference/metrics.md)
TensorBoard  $OUT/tensorboard
TEXT
exit "$verdict"
