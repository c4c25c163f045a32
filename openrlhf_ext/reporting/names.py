"""The names of all metrics, with unit and meaning. docs/metrics.md shows this table; a test keeps them equal."""

from __future__ import annotations

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


METRICS: list[Metric] = []
"""All metrics, in the order of docs/metrics.md."""


def _metric(name: str, unit: str, meaning: str) -> str:
    """Documents a metric and gives back its name."""
    METRICS.append(Metric(name, unit, meaning))
    return name


RANK_PREFIX = "rank/"
REWARD_LOG_PREFIX = "reward_log/"
ALGORITHM_PREFIX = "algorithm/"

STEP = _metric("step", "steps", "optimizer step the record belongs to, from 1; 0 is a record made before training")
TIME = _metric("time", "s", "wall clock when the record was written, seconds since 1970")
NONFINITE = _metric(
    "nonfinite", "text", "present only if a metric is NaN or infinite: its name, and `nan`, `inf` or `-inf`"
)
REWARD_MEAN = _metric("reward/mean", "reward", "mean over the completions of the step, before any shaping")
REWARD_STD = _metric("reward/std", "reward", "standard deviation over the completions of the step")
REWARD_FAILURES = _metric("reward/failures", "completions", "completions of the step that could not be graded")
ACCURACY_MEAN = _metric(
    "accuracy/mean", "fraction", "mean score over the completions of the step (`scores` of the reward function)"
)
ENTROPY_MEAN = _metric(
    "entropy/mean", "nats", "mean over completion tokens of the policy's entropy at the rollout temperature"
)
RESPONSE_LENGTH_MEAN = _metric(
    "response/length_mean", "tokens", "mean completion length, end-of-sequence token included"
)
RESPONSE_TRUNCATED_RATE = _metric("response/truncated_rate", "fraction", "completions that reached the length limit")
KL_ROLLOUT = _metric(
    "kl/rollout",
    "nats",
    "mean over completion tokens of the k3 estimator exp(d) - d - 1, d = log-prob of the policy before the step "
    "minus log-prob of the rollout engine: how far trainer and engine disagree on the same weights (asynchronous "
    "runs: and how far the policy has moved on since)",
)
KL_ROLLOUT_MAX_ABS = _metric("kl/rollout_max_abs", "nats", "largest absolute difference d of any completion token")
KL_REFERENCE = _metric(
    "kl/reference",
    "nats",
    "mean over completion tokens of the k3 estimator of KL(policy before the step, reference policy); only with a "
    "KL penalty",
)
KL_COEF = _metric("kl/coef", "1", "coefficient of the KL penalty in the step")
VALUE_MEAN = _metric(
    "value/mean", "reward", "mean of the critic's values over completion tokens, before the step; only with a critic"
)
VALUE_RETURN_MEAN = _metric(
    "value/return_mean", "reward", "mean over completion tokens of the returns the critic is trained towards"
)
VALUE_EXPLAINED_VARIANCE = _metric(
    "value/explained_variance",
    "1",
    "1 - Var(returns - values) / Var(returns) over completion tokens: 1 if the critic knows the returns, 0 if it "
    "is no better than their mean; missing if all returns are equal",
)
LOSS_VALUE = _metric(
    "loss/value", "loss", "value loss of the whole batch, mean over the critic's optimizer updates of the step"
)
VALUE_CLIP_FRACTION = _metric(
    "value/clip_fraction", "fraction", "completion tokens whose value was clipped and got no gradient"
)
VALUE_GRAD_NORM = _metric("value/grad_norm", "norm", "global L2 norm of the critic's gradient before clipping")
VALUE_LR = _metric("value/lr", "1", "learning rate of the critic")
KL_ROLLOUT_REVERSE = _metric(
    "kl/rollout_reverse",
    "nats",
    "mean over completion tokens of 1 - w + w d with w = exp(d): the estimator of KL(policy, engine) from tokens "
    "that the engine sampled, as `kl/rollout` is that of KL(engine, policy)",
)
MISMATCH_MEAN_ABS = _metric("mismatch/mean_abs", "nats", "mean over completion tokens of the absolute difference d")
MISMATCH_EXP_MEAN_ABS = _metric(
    "mismatch/exp_mean_abs",
    "1",
    "exp of `mismatch/mean_abs`: by how much the probability of a token typically differs; 1 if trainer and "
    "engine agree",
)
MISMATCH_ESS_TOKENS = _metric(
    "mismatch/ess_tokens",
    "fraction",
    "effective sample size of the completion tokens under the weights exp(d), over their number: 1 if trainer and"
    " engine agree",
)
MISMATCH_ESS_COMPLETIONS = _metric(
    "mismatch/ess_completions", "fraction", "the same of whole completions, weighted by exp(sum of d)"
)
MISMATCH_OUTSIDE_BAND = _metric(
    "mismatch/outside_band",
    "fraction",
    "completion tokens whose exp(d) lies outside the thresholds of the importance correction (0.5 to 5 if none "
    "goes by this ratio): what it drops or clamps, or would",
)
DRIFT_LOGPROB = _metric(
    "drift/logprob_max_abs",
    "nats",
    "with `train.drift_check`: largest change of the policy's log-prob of any completion token by a step with "
    "learning rate 0",
)
GRAD_NORM_EMBEDDING = _metric(
    "grad_norm/embedding",
    "norm",
    "L2 norm, before clipping, of the gradient of the input embedding (and of the head where they are tied)",
)
GRAD_NORM_ATTENTION = _metric(
    "grad_norm/attention",
    "norm",
    "the same of the attention projections of all layers; the squares of all groups add up to that of `grad_norm`",
)
GRAD_NORM_MLP = _metric("grad_norm/mlp", "norm", "the same of the MLP projections")
GRAD_NORM_NORMS = _metric("grad_norm/norms", "norm", "the same of all norm weights")
GRAD_NORM_HEAD = _metric(
    "grad_norm/head", "norm", "the same of the vocabulary projection; missing where it is tied to the embedding"
)
TRAIN_TOKENS_PER_SECOND = _metric(
    "throughput/train_tokens_per_second",
    "tokens/s",
    "prompt and completion tokens through the training passes, over `time/train`",
)
TRAIN_TFLOPS = _metric(
    "throughput/train_tflops_per_rank",
    "TFLOP/s",
    "model operations (layers, causal attention, head; forward and backward, without recomputation) of the "
    "training passes over `time/train` and policy ranks",
)
TRAIN_MFU = _metric(
    "throughput/train_mfu",
    "fraction",
    "`throughput/train_tflops_per_rank` over what the device could do (`logger.peak_tflops`); missing where that "
    "is not known",
)
LOGPROB_TOKENS_PER_SECOND = _metric(
    "throughput/logprob_tokens_per_second",
    "tokens/s",
    "prompt and completion tokens through the old-log-prob pass, over `time/logprob`",
)
LOGPROB_TFLOPS = _metric(
    "throughput/logprob_tflops_per_rank",
    "TFLOP/s",
    "the same as `throughput/train_tflops_per_rank` for the old-log-prob pass (forward only)",
)
LOGPROB_MFU = _metric(
    "throughput/logprob_mfu", "fraction", "the same as `throughput/train_mfu` for the old-log-prob pass"
)
MEMORY_RANK_MAX = _metric(
    "memory/rank_max_gib",
    "GiB",
    "largest peak memory of any policy rank since it started: device memory, or resident memory of the process on CPU",
)
_metric(
    RANK_PREFIX + "*",
    "see right",
    "per policy rank: `rank/<n>/time_logprob`, `time_train`, `time_sync` (s, without waiting for other replicas "
    "in the gradient reduction) and `memory_gib` (GiB); `rank/slowest` and `rank/fullest` name ranks, "
    "`rank/slowest_over_mean` is the slowest rank's time in log-probs and training over the mean of all",
)
LOSS_POLICY = _metric(
    "loss/policy", "loss", "policy loss of the whole batch, mean over the optimizer updates of the step"
)
LOSS_CLIP_FRACTION = _metric(
    "loss/clip_fraction",
    "fraction",
    "completion tokens (gspo and grpo_s: completions) whose probability ratio was clipped",
)
GRAD_NORM = _metric("grad_norm", "norm", "global L2 norm of the gradient before clipping")
LR = _metric("lr", "1", "learning rate of the step")
PROMPTS_CONSUMED = _metric("prompts/consumed", "prompts", "prompts taken from the data set since the start of the run")
PROMPTS_SKIPPED_OVERLONG = _metric(
    "prompts/skipped_overlong", "prompts", "prompts left out because they are too long, since the start"
)
WEIGHT_SYNC_PROBE = _metric(
    "weight_sync/probe_max_abs_diff",
    "nats",
    "after the sync: largest difference between the engine's and the policy's log-probs on a fixed prompt",
)
WEIGHT_SYNC_VERSION = _metric(
    "weight_sync/version", "version", "number of weight updates the rollout engines have received"
)
WEIGHT_SYNC_SECONDS = _metric(
    "weight_sync/seconds", "s", "from the first bucket until the last engine samples from the new weights"
)
WEIGHT_SYNC_BYTES = _metric(
    "weight_sync/bytes", "bytes", "all tensors of one update; every engine worker receives so many"
)
WEIGHT_SYNC_LOAD_SECONDS = _metric(
    "weight_sync/load_seconds", "s", "of `weight_sync/seconds`: loading, not waiting; the slowest engine worker"
)
ENGINE_RESTARTS = _metric("engines/restarts", "restarts", "rollout engines restarted since the start of the run")
TIME_GENERATE = _metric("time/generate", "s", "generation of the step's completions, without exposed grading")
TIME_GRADE = _metric("time/grade", "s", "grading that generation did not hide; the maximum over the engines")
TIME_LOGPROB = _metric("time/logprob", "s", "old log-probs and entropies, reference log-probs and values")
TIME_SHAPE = _metric("time/shape", "s", "advantages and loss weights")
TIME_TRAIN = _metric("time/train", "s", "forward, backward and optimizer")
TIME_SYNC = _metric("time/sync", "s", "sending the weights to the engines, probe included")
TIME_STEP = _metric("time/step", "s", "the whole step")
TOKENS_PER_SECOND = _metric(
    "throughput/tokens_per_second", "tokens/s", "generated tokens over seconds of the whole step"
)
STALENESS_MEAN = _metric(
    "staleness/mean",
    "updates",
    "mean over completion tokens of the weight updates between the weights that sampled the token and those that "
    "the policy has when its training begins; 0 in synchronous runs",
)
STALENESS_MAX = _metric("staleness/max", "updates", "the same for the token that is furthest behind")
STALENESS_MIXED_FRACTION = _metric(
    "staleness/mixed_fraction",
    "fraction",
    "completions whose tokens were sampled with more than one version of the weights (partial rollouts)",
)
GROUPS_KEPT_FRACTION = _metric(
    "groups/kept_fraction", "fraction", "groups of the step over those and the ones that dynamic sampling dropped"
)
GROUPS_IN_FLIGHT = _metric("groups/in_flight", "groups", "asked for and not finished when the step ends")
GROUPS_QUEUED = _metric("groups/queued", "groups", "finished and waiting for training when the step ends")
GROUPS_FILTERED = _metric(
    "groups/dropped_filtered", "groups", "dropped by dynamic sampling since the start: all right or all wrong"
)
GROUPS_LATE = _metric(
    "groups/dropped_late",
    "groups",
    "dropped since the start because they lagged by more than `train.max_staleness` (`train.late_groups drop`)",
)
GROUPS_TRAINED_LATE = _metric(
    "groups/trained_late", "groups", "groups of the step that lagged by more than `train.max_staleness`"
)
TIME_WAIT_ROLLOUTS = _metric(
    "time/wait_rollouts", "s", "the policy was idle: training waited for groups; part of `time/step`"
)
TIME_IDLE_ENGINES = _metric(
    "time/idle_engines", "s", "the engines were idle: neither generating nor grading, mean over the engines"
)
TIME_WAIT_SYNC = _metric(
    "time/wait_sync",
    "s",
    "without partial rollouts: the weight sync waited for the groups in flight; part of `time/sync`",
)
OFFLOAD_FREED_MIB = _metric(
    "offload/freed_mib",
    "MiB",
    "rank 0, `ds.enable_sleep`: device memory that the step's offloads gave back (on CPU: bytes of storages that "
    "could be emptied)",
)
OFFLOAD_SECONDS = _metric("offload/seconds", "s", "rank 0: moving states to host memory")
OFFLOAD_RELOAD_SECONDS = _metric("offload/reload_seconds", "s", "rank 0: moving them back")
TOKENS_GENERATED = _metric("tokens/generated", "tokens", "completion tokens generated in the step")
EVAL_ACCURACY = _metric("eval/accuracy", "fraction", "mean score over the sampled completions of the held-out prompts")
EVAL_RESPONSE_LENGTH_MEAN = _metric(
    "eval/response_length_mean", "tokens", "mean completion length on the held-out prompts"
)
EVAL_REWARD_MEAN = _metric("eval/reward_mean", "reward", "mean reward on the held-out prompts")
EVAL_SAMPLES = _metric("eval/samples", "completions", "completions sampled for the evaluation")
TIME_EVAL = _metric("time/eval", "s", "the evaluation; not part of `time/step`")
_metric(REWARD_LOG_PREFIX + "*", "the function's", "mean of each key the reward function returns in `extra_logs`")
_metric(ALGORITHM_PREFIX + "groups", "groups", "prompts whose completions were shaped in the step")
_metric(
    ALGORITHM_PREFIX + "degenerate_groups",
    "fraction",
    "groups without a signal: all completions right or all wrong (or all rewards equal, as the method defines it)",
)
_metric(ALGORITHM_PREFIX + "kept_completions", "fraction", "completions whose group was not dropped as degenerate")
_metric(
    ALGORITHM_PREFIX + "active_completions",
    "fraction",
    "completions that carry loss: kept, and not masked as truncated",
)
_metric(
    ALGORITHM_PREFIX + "success_rate",
    "fraction",
    "completions that the method counts as successes (reward above `success_threshold`; in gtpo_conflict:"
    " advantage above 0)",
)
_metric(
    ALGORITHM_PREFIX + "penalised_reward", "reward", "mean reward after length penalties and a KL penalty in the reward"
)
_metric(
    ALGORITHM_PREFIX + "entropy_correct",
    "nats",
    "mean token entropy of the successes, before the step; missing if there are none",
)
_metric(ALGORITHM_PREFIX + "entropy_wrong", "nats", "the same of the failures")
for fifth in range(1, 6):
    _metric(
        f"{ALGORITHM_PREFIX}advantage_mass_q{fifth}",
        "fraction",
        f"share of the sum of absolute advantages on the tokens of fifth {fifth} of the entropy distribution (1: "
        "lowest entropies); missing if all advantages are 0",
    )
_metric(
    ALGORITHM_PREFIX + "correction_filtered",
    "fraction",
    "completion tokens that the importance correction dropped or clamped",
)
_metric(
    ALGORITHM_PREFIX + "rollout_kl",
    "nats",
    "mean over completion tokens of rollout minus old log-prob; only with an importance correction",
)
_metric(
    ALGORITHM_PREFIX + "conflict_forward",
    "fraction",
    "gtpo_conflict: completion tokens in the conflict span from the start",
)
_metric(
    ALGORITHM_PREFIX + "conflict_backward",
    "fraction",
    "gtpo_conflict: completion tokens in the conflict span towards the end",
)
_metric(
    ALGORITHM_PREFIX + "filtered_completions", "fraction", "gtpo_conflict: completions removed by the entropy filter"
)
_metric(
    ALGORITHM_PREFIX + "initial_entropy",
    "nats",
    "gtpo_conflict: mean over completions of their mean token entropy, before training (step 0)",
)
_metric(
    ALGORITHM_PREFIX + "clip_fraction_high",
    "fraction",
    "completion tokens that were clipped and have a positive advantage",
)
_metric(
    ALGORITHM_PREFIX + "clip_fraction_low",
    "fraction",
    "completion tokens that were clipped and have a negative advantage",
)
_metric(
    ALGORITHM_PREFIX + "policy_kl",
    "nats",
    "mean over loss tokens of old minus new log-prob, in the updates of the step",
)
_metric(
    ALGORITHM_PREFIX + "ref_kl",
    "nats",
    "mean over loss tokens of the KL estimate in the loss, in the updates of the step",
)
_metric(ALGORITHM_PREFIX + "zero_batch_loss", "loss", "mixed_policy_dapo: loss on the groups without a success")
_metric(ALGORITHM_PREFIX + "optimizer_steps", "updates", "optimizer updates of the step")
_metric(ALGORITHM_PREFIX + "*", "see the method", "what else an algorithm reports about shaping and loss")

_NAMES = frozenset(metric.name for metric in METRICS)
_FAMILIES = tuple(metric.name.removesuffix("*") for metric in METRICS if metric.name.endswith("/*"))


def is_documented(name: str) -> bool:
    """Whether a metric name stands in :data:`METRICS`, itself or by its family."""
    return name in _NAMES or name.startswith(_FAMILIES)


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])
