"""The names of all metrics, with unit and meaning. docs/metrics.md shows this table; a test keeps them equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One documented metric.

    Attributes:
        name: as in metrics.jsonl; a name that ends in ``/*`` stands for a family.
        unit: unit, or what is counted.
        meaning: how it is computed and over what.
    """

    name: str
    unit: str
    meaning: str


STEP = "step"
TIME = "time"
NONFINITE = "nonfinite"
REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"
REWARD_FAILURES = "reward/failures"
ACCURACY_MEAN = "accuracy/mean"
ENTROPY_MEAN = "entropy/mean"
RESPONSE_LENGTH_MEAN = "response/length_mean"
RESPONSE_TRUNCATED_RATE = "response/truncated_rate"
KL_ROLLOUT = "kl/rollout"
KL_ROLLOUT_MAX_ABS = "kl/rollout_max_abs"
KL_REFERENCE = "kl/reference"
KL_COEF = "kl/coef"
VALUE_MEAN = "value/mean"
VALUE_RETURN_MEAN = "value/return_mean"
VALUE_EXPLAINED_VARIANCE = "value/explained_variance"
LOSS_VALUE = "loss/value"
VALUE_CLIP_FRACTION = "value/clip_fraction"
VALUE_GRAD_NORM = "value/grad_norm"
VALUE_LR = "value/lr"
KL_ROLLOUT_REVERSE = "kl/rollout_reverse"
MISMATCH_MEAN_ABS = "mismatch/mean_abs"
MISMATCH_EXP_MEAN_ABS = "mismatch/exp_mean_abs"
MISMATCH_ESS_TOKENS = "mismatch/ess_tokens"
MISMATCH_ESS_COMPLETIONS = "mismatch/ess_completions"
MISMATCH_OUTSIDE_BAND = "mismatch/outside_band"
DRIFT_LOGPROB = "drift/logprob_max_abs"
GRAD_NORM_EMBEDDING = "grad_norm/embedding"
GRAD_NORM_ATTENTION = "grad_norm/attention"
GRAD_NORM_MLP = "grad_norm/mlp"
GRAD_NORM_NORMS = "grad_norm/norms"
GRAD_NORM_HEAD = "grad_norm/head"
TRAIN_TOKENS_PER_SECOND = "throughput/train_tokens_per_second"
TRAIN_TFLOPS = "throughput/train_tflops_per_rank"
TRAIN_MFU = "throughput/train_mfu"
LOGPROB_TOKENS_PER_SECOND = "throughput/logprob_tokens_per_second"
LOGPROB_TFLOPS = "throughput/logprob_tflops_per_rank"
LOGPROB_MFU = "throughput/logprob_mfu"
MEMORY_RANK_MAX = "memory/rank_max_gib"
RANK_PREFIX = "rank/"
LOSS_POLICY = "loss/policy"
LOSS_CLIP_FRACTION = "loss/clip_fraction"
GRAD_NORM = "grad_norm"
LR = "lr"
PROMPTS_CONSUMED = "prompts/consumed"
PROMPTS_SKIPPED_OVERLONG = "prompts/skipped_overlong"
GROUPS_KEPT_FRACTION = "groups/kept_fraction"
WEIGHT_SYNC_PROBE = "weight_sync/probe_max_abs_diff"
WEIGHT_SYNC_VERSION = "weight_sync/version"
WEIGHT_SYNC_SECONDS = "weight_sync/seconds"
WEIGHT_SYNC_BYTES = "weight_sync/bytes"
WEIGHT_SYNC_LOAD_SECONDS = "weight_sync/load_seconds"
ENGINE_RESTARTS = "engines/restarts"
TIME_GENERATE = "time/generate"
TIME_GRADE = "time/grade"
TIME_LOGPROB = "time/logprob"
TIME_SHAPE = "time/shape"
TIME_TRAIN = "time/train"
TIME_SYNC = "time/sync"
TIME_STEP = "time/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
TOKENS_GENERATED = "tokens/generated"
STALENESS_MEAN = "staleness/mean"
STALENESS_MAX = "staleness/max"
STALENESS_MIXED_FRACTION = "staleness/mixed_fraction"
QUEUE_BATCHES = "queue/batches"
TIME_WAIT_ROLLOUTS = "time/wait_rollouts"
TIME_WAIT_SYNC = "time/wait_sync"
OFFLOAD_FREED_MIB = "offload/freed_mib"
OFFLOAD_SECONDS = "offload/seconds"
OFFLOAD_RELOAD_SECONDS = "offload/reload_seconds"
EVAL_ACCURACY = "eval/accuracy"
EVAL_RESPONSE_LENGTH_MEAN = "eval/response_length_mean"
EVAL_REWARD_MEAN = "eval/reward_mean"
EVAL_SAMPLES = "eval/samples"
TIME_EVAL = "time/eval"
REWARD_LOG_PREFIX = "reward_log/"
ALGORITHM_PREFIX = "algorithm/"

METRICS: tuple[Metric, ...] = (
    Metric(STEP, "steps", "optimizer step the record belongs to, from 1; 0 is a record made before training"),
    Metric(TIME, "s", "wall clock when the record was written, seconds since 1970"),
    Metric(NONFINITE, "text", "present only if a metric is NaN or infinite: its name, and `nan`, `inf` or `-inf`"),
    Metric(REWARD_MEAN, "reward", "mean over the completions of the step, before any shaping"),
    Metric(REWARD_STD, "reward", "standard deviation over the completions of the step"),
    Metric(REWARD_FAILURES, "completions", "completions of the step that could not be graded"),
    Metric(ACCURACY_MEAN, "fraction", "mean score over the completions of the step (`scores` of the reward function)"),
    Metric(ENTROPY_MEAN, "nats", "mean over completion tokens of the policy's entropy at the rollout temperature"),
    Metric(RESPONSE_LENGTH_MEAN, "tokens", "mean completion length, end-of-sequence token included"),
    Metric(RESPONSE_TRUNCATED_RATE, "fraction", "completions that reached the length limit"),
    Metric(
        KL_ROLLOUT,
        "nats",
        "mean over completion tokens of the k3 estimator exp(d) - d - 1, d = log-prob of the policy before the step "
        "minus log-prob of the rollout engine: how far trainer and engine disagree on the same weights (asynchronous "
        "runs: and how far the policy has moved on since)",
    ),
    Metric(KL_ROLLOUT_MAX_ABS, "nats", "largest absolute difference d of any completion token"),
    Metric(
        KL_REFERENCE,
        "nats",
        "mean over completion tokens of the k3 estimator of KL(policy before the step, reference policy); only with a "
        "KL penalty",
    ),
    Metric(KL_COEF, "1", "coefficient of the KL penalty in the step"),
    Metric(
        VALUE_MEAN, "reward", "mean of the critic's values over completion tokens, before the step; only with a critic"
    ),
    Metric(VALUE_RETURN_MEAN, "reward", "mean over completion tokens of the returns the critic is trained towards"),
    Metric(
        VALUE_EXPLAINED_VARIANCE,
        "1",
        "1 - Var(returns - values) / Var(returns) over completion tokens: 1 if the critic knows the returns, 0 if it "
        "is no better than their mean; missing if all returns are equal",
    ),
    Metric(LOSS_VALUE, "loss", "value loss of the whole batch, mean over the critic's optimizer updates of the step"),
    Metric(VALUE_CLIP_FRACTION, "fraction", "completion tokens whose value was clipped and got no gradient"),
    Metric(VALUE_GRAD_NORM, "norm", "global L2 norm of the critic's gradient before clipping"),
    Metric(VALUE_LR, "1", "learning rate of the critic"),
    Metric(
        KL_ROLLOUT_REVERSE,
        "nats",
        "mean over completion tokens of 1 - w + w d with w = exp(d): the estimator of KL(policy, engine) from tokens "
        "that the engine sampled, as `kl/rollout` is that of KL(engine, policy)",
    ),
    Metric(
        MISMATCH_MEAN_ABS,
        "nats",
        "mean over completion tokens of the absolute difference d",
    ),
    Metric(
        MISMATCH_EXP_MEAN_ABS,
        "1",
        "exp of `mismatch/mean_abs`: by how much the probability of a token typically differs; 1 if trainer and "
        "engine agree",
    ),
    Metric(
        MISMATCH_ESS_TOKENS,
        "fraction",
        "effective sample size of the completion tokens under the weights exp(d), over their number: 1 if trainer and"
        " engine agree",
    ),
    Metric(
        MISMATCH_ESS_COMPLETIONS,
        "fraction",
        "the same of whole completions, weighted by exp(sum of d)",
    ),
    Metric(
        MISMATCH_OUTSIDE_BAND,
        "fraction",
        "completion tokens whose exp(d) lies outside the thresholds of the importance correction (0.5 to 5 if none "
        "goes by this ratio): what it drops or clamps, or would",
    ),
    Metric(
        DRIFT_LOGPROB,
        "nats",
        "with `train.drift_check`: largest change of the policy's log-prob of any completion token by a step with "
        "learning rate 0",
    ),
    Metric(
        GRAD_NORM_EMBEDDING,
        "norm",
        "L2 norm, before clipping, of the gradient of the input embedding (and of the head where they are tied)",
    ),
    Metric(
        GRAD_NORM_ATTENTION,
        "norm",
        "the same of the attention projections of all layers; the squares of all groups add up to that of `grad_norm`",
    ),
    Metric(
        GRAD_NORM_MLP,
        "norm",
        "the same of the MLP projections",
    ),
    Metric(
        GRAD_NORM_NORMS,
        "norm",
        "the same of all norm weights",
    ),
    Metric(
        GRAD_NORM_HEAD,
        "norm",
        "the same of the vocabulary projection; missing where it is tied to the embedding",
    ),
    Metric(
        TRAIN_TOKENS_PER_SECOND,
        "tokens/s",
        "prompt and completion tokens through the training passes, over `time/train`",
    ),
    Metric(
        TRAIN_TFLOPS,
        "TFLOP/s",
        "model operations (layers, causal attention, head; forward and backward, without recomputation) of the "
        "training passes over `time/train` and policy ranks",
    ),
    Metric(
        TRAIN_MFU,
        "fraction",
        "`throughput/train_tflops_per_rank` over what the device could do (`logger.peak_tflops`); missing where that "
        "is not known",
    ),
    Metric(
        LOGPROB_TOKENS_PER_SECOND,
        "tokens/s",
        "prompt and completion tokens through the old-log-prob pass, over `time/logprob`",
    ),
    Metric(
        LOGPROB_TFLOPS,
        "TFLOP/s",
        "the same as `throughput/train_tflops_per_rank` for the old-log-prob pass (forward only)",
    ),
    Metric(
        LOGPROB_MFU,
        "fraction",
        "the same as `throughput/train_mfu` for the old-log-prob pass",
    ),
    Metric(
        MEMORY_RANK_MAX,
        "GiB",
        "largest peak memory of any policy rank since it started: device memory, or resident memory of the process on"
        " CPU",
    ),
    Metric(
        RANK_PREFIX + "*",
        "see right",
        "per policy rank: `rank/<n>/time_logprob`, `time_train`, `time_sync` (s, without waiting for other replicas "
        "in the gradient reduction) and `memory_gib` (GiB); `rank/slowest` and `rank/fullest` name ranks, "
        "`rank/slowest_over_mean` is the slowest rank's time in log-probs and training over the mean of all",
    ),
    Metric(LOSS_POLICY, "loss", "policy loss of the whole batch, mean over the optimizer updates of the step"),
    Metric(
        LOSS_CLIP_FRACTION,
        "fraction",
        "completion tokens (gspo and grpo_s: completions) whose probability ratio was clipped",
    ),
    Metric(GRAD_NORM, "norm", "global L2 norm of the gradient before clipping"),
    Metric(LR, "1", "learning rate of the step"),
    Metric(PROMPTS_CONSUMED, "prompts", "prompts taken from the data set since the start of the run"),
    Metric(PROMPTS_SKIPPED_OVERLONG, "prompts", "prompts left out because they are too long, since the start"),
    Metric(GROUPS_KEPT_FRACTION, "fraction", "groups of the step kept by dynamic filtering; 1 without it"),
    Metric(
        WEIGHT_SYNC_PROBE,
        "nats",
        "after the sync: largest difference between the engine's and the policy's log-probs on a fixed prompt",
    ),
    Metric(WEIGHT_SYNC_VERSION, "version", "number of weight updates the rollout engines have received"),
    Metric(WEIGHT_SYNC_SECONDS, "s", "from the first bucket until the last engine samples from the new weights"),
    Metric(WEIGHT_SYNC_BYTES, "bytes", "all tensors of one update; every engine worker receives so many"),
    Metric(WEIGHT_SYNC_LOAD_SECONDS, "s", "of `weight_sync/seconds`: loading, not waiting; the slowest engine worker"),
    Metric(ENGINE_RESTARTS, "restarts", "rollout engines restarted since the start of the run"),
    Metric(TIME_GENERATE, "s", "generation of the step's completions, without exposed grading"),
    Metric(TIME_GRADE, "s", "grading that generation did not hide; the maximum over the engines"),
    Metric(TIME_LOGPROB, "s", "old log-probs and entropies, reference log-probs and values"),
    Metric(TIME_SHAPE, "s", "advantages and loss weights"),
    Metric(TIME_TRAIN, "s", "forward, backward and optimizer"),
    Metric(TIME_SYNC, "s", "sending the weights to the engines, probe included"),
    Metric(TIME_STEP, "s", "the whole step"),
    Metric(TOKENS_PER_SECOND, "tokens/s", "generated tokens over seconds of the whole step"),
    Metric(
        STALENESS_MEAN,
        "updates",
        "mean over completion tokens of the weight updates between the weights that sampled the token and those that "
        "the policy has when its training begins; 0 in synchronous runs",
    ),
    Metric(STALENESS_MAX, "updates", "the same for the token that is furthest behind"),
    Metric(
        STALENESS_MIXED_FRACTION,
        "fraction",
        "completions whose tokens were sampled with more than one version of the weights (partial rollouts)",
    ),
    Metric(QUEUE_BATCHES, "batches", "asynchronous runs: batches of rollouts that wait when the step ends"),
    Metric(TIME_WAIT_ROLLOUTS, "s", "asynchronous runs: training waited for a batch of rollouts; part of `time/step`"),
    Metric(
        TIME_WAIT_SYNC,
        "s",
        "asynchronous runs without partial rollouts: the weight sync waited for the batch under way; part of "
        "`time/sync`",
    ),
    Metric(
        OFFLOAD_FREED_MIB,
        "MiB",
        "rank 0, `ds.enable_sleep`: device memory that the step's offloads gave back (on CPU: bytes of storages that "
        "could be emptied)",
    ),
    Metric(OFFLOAD_SECONDS, "s", "rank 0: moving states to host memory"),
    Metric(OFFLOAD_RELOAD_SECONDS, "s", "rank 0: moving them back"),
    Metric(TOKENS_GENERATED, "tokens", "completion tokens generated in the step"),
    Metric(EVAL_ACCURACY, "fraction", "mean score over the sampled completions of the held-out prompts"),
    Metric(EVAL_RESPONSE_LENGTH_MEAN, "tokens", "mean completion length on the held-out prompts"),
    Metric(EVAL_REWARD_MEAN, "reward", "mean reward on the held-out prompts"),
    Metric(EVAL_SAMPLES, "completions", "completions sampled for the evaluation"),
    Metric(TIME_EVAL, "s", "the evaluation; not part of `time/step`"),
    Metric(REWARD_LOG_PREFIX + "*", "the function's", "mean of each key the reward function returns in `extra_logs`"),
    Metric(ALGORITHM_PREFIX + "groups", "groups", "prompts whose completions were shaped in the step"),
    Metric(
        ALGORITHM_PREFIX + "degenerate_groups",
        "fraction",
        "groups without a signal: all completions right or all wrong (or all rewards equal, as the method defines it)",
    ),
    Metric(ALGORITHM_PREFIX + "kept_completions", "fraction", "completions whose group was not dropped as degenerate"),
    Metric(
        ALGORITHM_PREFIX + "active_completions",
        "fraction",
        "completions that carry loss: kept, and not masked as truncated",
    ),
    Metric(
        ALGORITHM_PREFIX + "success_rate",
        "fraction",
        "completions that the method counts as successes (reward above `success_threshold`; in gtpo_conflict:"
        " advantage above 0)",
    ),
    Metric(
        ALGORITHM_PREFIX + "penalised_reward",
        "reward",
        "mean reward after length penalties and a KL penalty in the reward",
    ),
    Metric(
        ALGORITHM_PREFIX + "entropy_correct",
        "nats",
        "mean token entropy of the successes, before the step; missing if there are none",
    ),
    Metric(ALGORITHM_PREFIX + "entropy_wrong", "nats", "the same of the failures"),
    *(
        Metric(
            f"{ALGORITHM_PREFIX}advantage_mass_q{fifth}",
            "fraction",
            f"share of the sum of absolute advantages on the tokens of fifth {fifth} of the entropy distribution (1: "
            "lowest entropies); missing if all advantages are 0",
        )
        for fifth in range(1, 6)
    ),
    Metric(
        ALGORITHM_PREFIX + "correction_filtered",
        "fraction",
        "completion tokens that the importance correction dropped or clamped",
    ),
    Metric(
        ALGORITHM_PREFIX + "rollout_kl",
        "nats",
        "mean over completion tokens of rollout minus old log-prob; only with an importance correction",
    ),
    Metric(
        ALGORITHM_PREFIX + "conflict_forward",
        "fraction",
        "gtpo_conflict: completion tokens in the conflict span from the start",
    ),
    Metric(
        ALGORITHM_PREFIX + "conflict_backward",
        "fraction",
        "gtpo_conflict: completion tokens in the conflict span towards the end",
    ),
    Metric(
        ALGORITHM_PREFIX + "filtered_completions",
        "fraction",
        "gtpo_conflict: completions removed by the entropy filter",
    ),
    Metric(
        ALGORITHM_PREFIX + "initial_entropy",
        "nats",
        "gtpo_conflict: mean over completions of their mean token entropy, before training (step 0)",
    ),
    Metric(
        ALGORITHM_PREFIX + "clip_fraction_high",
        "fraction",
        "completion tokens that were clipped and have a positive advantage",
    ),
    Metric(
        ALGORITHM_PREFIX + "clip_fraction_low",
        "fraction",
        "completion tokens that were clipped and have a negative advantage",
    ),
    Metric(
        ALGORITHM_PREFIX + "policy_kl",
        "nats",
        "mean over loss tokens of old minus new log-prob, in the updates of the step",
    ),
    Metric(
        ALGORITHM_PREFIX + "ref_kl",
        "nats",
        "mean over loss tokens of the KL estimate in the loss, in the updates of the step",
    ),
    Metric(ALGORITHM_PREFIX + "zero_batch_loss", "loss", "mixed_policy_dapo: loss on the groups without a success"),
    Metric(ALGORITHM_PREFIX + "optimizer_steps", "updates", "optimizer updates of the step"),
    Metric(ALGORITHM_PREFIX + "*", "see the method", "what else an algorithm reports about shaping and loss"),
)

_NAMES = frozenset(metric.name for metric in METRICS)
_FAMILIES = tuple(metric.name.removesuffix("*") for metric in METRICS if metric.name.endswith("/*"))


def is_documented(name: str) -> bool:
    """Whether a metric name stands in :data:`METRICS`, itself or by its family."""
    return name in _NAMES or name.startswith(_FAMILIES)


def markdown_table(metrics: Iterable[Metric] = METRICS) -> str:
    """The table of docs/metrics.md."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])
