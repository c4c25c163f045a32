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
LOSS_POLICY = "loss/policy"
LOSS_CLIP_FRACTION = "loss/clip_fraction"
GRAD_NORM = "grad_norm"
LR = "lr"
PROMPTS_CONSUMED = "prompts/consumed"
PROMPTS_SKIPPED_OVERLONG = "prompts/skipped_overlong"
GROUPS_KEPT_FRACTION = "groups/kept_fraction"
WEIGHT_SYNC_PROBE = "weight_sync/probe_max_abs_diff"
WEIGHT_SYNC_VERSION = "weight_sync/version"
TIME_GENERATE = "time/generate"
TIME_GRADE = "time/grade"
TIME_LOGPROB = "time/logprob"
TIME_SHAPE = "time/shape"
TIME_TRAIN = "time/train"
TIME_SYNC = "time/sync"
TIME_STEP = "time/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
TOKENS_GENERATED = "tokens/generated"
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
        "minus log-prob of the rollout engine: how far trainer and engine disagree on the same weights",
    ),
    Metric(KL_ROLLOUT_MAX_ABS, "nats", "largest absolute difference d of any completion token"),
    Metric(LOSS_POLICY, "loss", "policy loss of the whole batch, mean over the optimizer updates of the step"),
    Metric(LOSS_CLIP_FRACTION, "fraction", "completion tokens whose probability ratio was clipped"),
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
    Metric(TIME_GENERATE, "s", "generation of the step's completions, without exposed grading"),
    Metric(TIME_GRADE, "s", "grading that generation did not hide; the maximum over the engines"),
    Metric(TIME_LOGPROB, "s", "old log-probs and entropies (and reference log-probs)"),
    Metric(TIME_SHAPE, "s", "advantages and loss weights"),
    Metric(TIME_TRAIN, "s", "forward, backward and optimizer"),
    Metric(TIME_SYNC, "s", "sending the weights to the engines, probe included"),
    Metric(TIME_STEP, "s", "the whole step"),
    Metric(TOKENS_PER_SECOND, "tokens/s", "generated tokens over seconds of the whole step"),
    Metric(TOKENS_GENERATED, "tokens", "completion tokens generated in the step"),
    Metric(EVAL_ACCURACY, "fraction", "mean score over the sampled completions of the held-out prompts"),
    Metric(EVAL_RESPONSE_LENGTH_MEAN, "tokens", "mean completion length on the held-out prompts"),
    Metric(EVAL_REWARD_MEAN, "reward", "mean reward on the held-out prompts"),
    Metric(EVAL_SAMPLES, "completions", "completions sampled for the evaluation"),
    Metric(TIME_EVAL, "s", "the evaluation; not part of `time/step`"),
    Metric(REWARD_LOG_PREFIX + "*", "the function's", "mean of each key the reward function returns in `extra_logs`"),
    Metric(ALGORITHM_PREFIX + "*", "see the method", "what the algorithm reports about shaping and loss"),
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
