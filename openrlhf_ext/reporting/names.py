"""The names of all metrics, with unit and meaning. docs/reference/metrics.md shows them; a test keeps
them equal."""

from __future__ import annotations

from dataclasses import dataclass

# what the writer itself adds to a record
STEP, TIME, NONFINITE, LABEL = "step", "time", "nonfinite", "label"


@dataclass(frozen=True)
class Metric:
    """One metric; a name that ends in ``/*`` stands for a family, a unit may be what is counted."""

    name: str
    unit: str
    meaning: str


# fmt: off
METRICS = (
    Metric("step", "steps", "optimizer step the record belongs to, from 1; 0 is a record made before training"),
    Metric("time", "s", "wall clock when the record was written, seconds since 1970"),
    Metric("nonfinite", "text", "present only if a metric is NaN or infinite: its name, and `nan`, `inf` or `-inf`"),
    Metric("label", "text",
        "present only if the policy is trained in FP8: the recipe, and `EMULATED` where FP8 is "
        "rounding only"),
    Metric("reward/mean", "reward", "mean over the completions of the step, before any shaping"),
    Metric("reward/std", "reward", "standard deviation over the completions of the step"),
    Metric("reward/failures", "completions", "completions of the step that could not be graded"),
    Metric("accuracy/mean", "fraction",
        "share of the step's completions that are right: whose score (`scores` of the reward "
        "function) is at least 1"),
    Metric("score/mean", "score",
        "mean score over the completions of the step: with scores of 0 and 1 the accuracy. It "
        "was called `accuracy/mean` up to version 0.1"),
    Metric("entropy/mean", "nats", "mean over completion tokens of the policy's entropy at the rollout temperature"),
    Metric("entropy/completion_mean", "nats",
        "mean over completions of their mean token entropy, as Simoni et al. plot it against ln "
        "2 (0.693), above which they filter completions; long completions count no more than "
        "short ones, in `entropy/mean` they do"),
    Metric("response/length_mean", "tokens", "mean completion length, end-of-sequence token included"),
    Metric("response/truncated_rate", "fraction", "completions that reached the length limit"),
    Metric("kl/rollout", "nats",
        "mean over completion tokens (without a guide's, here and below) of the k3 estimator "
        "exp(d) - d - 1, d = log-prob of the policy before the step minus log-prob of the "
        "rollout engine: how far trainer and engine disagree on the same weights (asynchronous "
        "runs: and how far the policy has moved on since)"),
    Metric("kl/rollout_max_abs", "nats", "largest absolute difference d of any completion token"),
    Metric("rollout/bit_equal", "fraction",
        "with `train.exact_rollout_enable`: completion tokens whose log-probs of policy and engine are the same "
        "bits, of those that the current weights sampled (of the batch's first update, if it has several); "
        "missing if there are none"),
    Metric("rollout/accepted", "tokens",
        "with `vllm.speculative.method`: tokens of a draft that were accepted, mean over the drafts of the "
        "completions that ended in the step; the step that checked a draft gave one token more. Missing if none was "
        "drafted"),
    Metric("guide/fraction", "fraction", "completions of the step that the guide sampled; only with a guide"),
    Metric("guide/reward_mean", "reward", "`reward/mean` of the guide's completions"),
    Metric("guide/accuracy_mean", "fraction", "`accuracy/mean` of the guide's completions"),
    Metric("guide/length_mean", "tokens", "`response/length_mean` of the guide's completions"),
    Metric("policy/reward_mean", "reward", "`reward/mean` of the policy's completions; only with a guide"),
    Metric("policy/accuracy_mean", "fraction", "`accuracy/mean` of the policy's completions; only with a guide"),
    Metric("policy/length_mean", "tokens", "`response/length_mean` of the policy's completions; only with a guide"),
    Metric("guide/rollout_max_abs", "nats",
        "largest absolute difference, on any token of the guide's completions, between the "
        "guide's log-prob and that of its engine: how far the two agree on the same weights"),
    Metric("kl/reference", "nats",
        "mean over completion tokens of the k3 estimator of KL(policy before the step, "
        "reference policy); only with a KL penalty"),
    Metric("kl/coef", "1", "coefficient of the KL penalty in the step"),
    Metric("value/mean", "reward",
        "mean of the critic's values over completion tokens, before the step; only with a critic"),
    Metric("value/return_mean", "reward", "mean over completion tokens of the returns the critic is trained towards"),
    Metric("value/explained_variance", "1",
        "1 - Var(returns - values) / Var(returns) over completion tokens: 1 if the critic knows "
        "the returns, 0 if it is no better than their mean; missing if all returns are equal"),
    Metric("loss/value", "loss", "value loss of the whole batch, mean over the critic's optimizer updates of the step"),
    Metric("value/clip_fraction", "fraction", "completion tokens whose value was clipped and got no gradient"),
    Metric("value/grad_norm", "norm", "global L2 norm of the critic's gradient before clipping"),
    Metric("value/lr", "1", "learning rate of the critic"),
    Metric("kl/rollout_reverse", "nats",
        "mean over completion tokens of 1 - w + w d with w = exp(d): the estimator of "
        "KL(policy, engine) from tokens that the engine sampled, as `kl/rollout` is that of "
        "KL(engine, policy)"),
    Metric("mismatch/mean_abs", "nats", "mean over completion tokens of the absolute difference d"),
    Metric("mismatch/entropy_mean_abs", "nats",
        "mean over completion tokens of the absolute difference of engine's and policy's "
        "entropies (algo.entropies engine)"),
    Metric("mismatch/exp_mean_abs", "1",
        "exp of `mismatch/mean_abs`: by how much the probability of a token typically differs; "
        "1 if trainer and engine agree"),
    Metric("mismatch/ess_tokens", "fraction",
        "effective sample size of the completion tokens under the weights exp(d), over their "
        "number: 1 if trainer and engine agree"),
    Metric("mismatch/ess_completions", "fraction", "the same of whole completions, weighted by exp(sum of d)"),
    Metric("mismatch/outside_band", "fraction",
        "completion tokens whose exp(d) lies outside the thresholds of the importance "
        "correction (0.5 to 5 if none goes by this ratio): what it drops or clamps, or would"),
    Metric("drift/logprob_diff", "nats",
        "with `train.drift_check`: how far a step with learning rate 0 moved the policy's "
        "log-probs of the completion tokens, mean over the tokens, below -5 in proportion"),
    Metric("grad_norm/embedding", "norm",
        "L2 norm, before clipping, of the gradient of the input embedding (and of the head "
        "where they are tied)"),
    Metric("grad_norm/attention", "norm",
        "the same of the attention projections of all layers; the squares of all groups add up "
        "to that of `grad_norm`"),
    Metric("grad_norm/mlp", "norm",
        "the same of the MLP projections; of a mixture, of the expert that sees every token, if "
        "there is one"),
    Metric("grad_norm/router", "norm", "the same of the routers of a mixture of experts"),
    Metric("grad_norm/experts", "norm", "the same of its experts"),
    Metric("grad_norm/norms", "norm", "the same of all norm weights"),
    Metric("grad_norm/head", "norm",
        "the same of the vocabulary projection; missing where it is tied to the embedding"),
    Metric("loss/balance", "loss",
        "with `actor.aux_loss_coef`: the loss that balances the load of experts, without its "
        "weight; 1 where it is even"),
    Metric("moe/load_max", "ratio",
        "tokens of a layer's fullest expert over those of its mean expert, mean over the layers "
        "and mini-batches"),
    Metric("moe/idle_experts", "count",
        "experts of a layer that no token of a mini-batch went to, mean over the layers and "
        "mini-batches"),
    Metric("moe/router_entropy", "nats",
        "entropy of the routers' distributions, mean over layers and tokens, prompts included"),
    Metric("moe/replay_changed", "fraction",
        "share of the tokens for which a layer's router would have chosen other experts than "
        "those that were replayed"),
    Metric("throughput/train_tokens_per_second", "tokens/s",
        "prompt and completion tokens through the training passes, over `time/train`"),
    Metric("throughput/train_tflops_per_rank", "TFLOP/s",
        "model operations (layers, causal attention, head; forward and backward, without "
        "recomputation) of the training passes over `time/train` and policy ranks"),
    Metric("throughput/train_mfu", "fraction",
        "`throughput/train_tflops_per_rank` over what the device could do "
        "(`logger.peak_tflops`); missing where that is not known"),
    Metric("throughput/logprob_tokens_per_second", "tokens/s",
        "prompt and completion tokens through the old-log-prob pass, over `time/logprob`"),
    Metric("throughput/logprob_tflops_per_rank", "TFLOP/s",
        "the same as `throughput/train_tflops_per_rank` for the old-log-prob pass (forward only)"),
    Metric("throughput/logprob_mfu", "fraction", "the same as `throughput/train_mfu` for the old-log-prob pass"),
    Metric("update/rms", "1",
        "root of the mean square of what a step's optimizer updates move: 1,024 entries of each "
        "parameter of a rank, of the fp32 weights where there are some"),
    Metric("update/still", "fraction",
        "share of these parameters none of whose entries has moved: frozen ones, and steps that "
        "rounding takes away"),
    Metric("update/second_moment", "1",
        "root of the mean of Adam's second moments of the same entries: begins near 0 where its "
        "states were lost"),
    Metric("update/adam_steps", "updates", "Adam's own count of its steps"),
    Metric("update/grad_norm", "norm",
        "global L2 norm of the gradient of the step's last update, behind the clip, as the "
        "optimizer used it: at most `actor.max_norm`"),
    Metric("update/beta1", "1", "Adam's, as its own parameter groups have it"),
    Metric("update/beta2", "1", "the same"),
    Metric("update/eps", "1", "the same"),
    Metric("update/weight_decay", "1", "the same; of the groups that have most, others have none"),
    Metric("advantage/group_mean_abs", "1",
        "size of the mean advantage of a prompt's completions, mean over prompts; 0 of methods "
        "that compare within a group"),
    Metric("advantage/group_rms", "1",
        "distance of a completion's advantage from the mean of its prompt's (root of the mean "
        "square), mean over prompts with unlike rewards; `grpo`: 0.94 with groups of 8, less "
        "than 1 for the deviation's n - 1; missing if there are none"),
    Metric("advantage/reward_correlation", "1",
        "correlation over completions of advantage and graded reward, both minus the mean of "
        "the prompt's completions; 1 of `grpo`, less of methods that shape by more; missing "
        "where one of them is the same in all groups"),
    Metric("mismatch/loss", "loss",
        "first update of the step: difference between the loss that the ranks report and the "
        "same loss in float64, from the old log-probs and what was shaped; supervised "
        "fine-tuning: from the log-probs and the number of trained tokens"),
    Metric("mismatch/trained", "nats",
        "first update of the step: the same of the mean product of advantage and log-prob: "
        "which advantages the ranks gave to which tokens"),
    Metric("mismatch/reference", "nats",
        "first update of the step: difference between `algorithm/ref_kl` and `kl/reference` of "
        "the same tokens; only with the estimator k3 in the loss"),
    Metric("mismatch/rewards", "reward",
        "greatest difference between a reward of the batch that was shaped and the one its "
        "completion was graded with: 0"),
    Metric("response/distinct", "fraction",
        "completions that differ from the others of their prompt, of all: 1 where none is there "
        "twice"),
    Metric("prompts/repeated", "prompts",
        "prompts of the step that were trained in the same episode before, more often than the "
        "data have them"),
    Metric("prompts/changed", "fraction",
        "prompts whose completions were sampled from other tokens than the prompt's: cut at "
        "`data.max_len`, or an agent's own"),
    Metric("entropy/surprise_correlation", "1",
        "correlation over completion tokens of entropy and minus log-prob: 0 where entropies "
        "are of other tokens"),
    Metric("prompts/length_mean", "tokens", "mean length of the prompts of the step's completions"),
    Metric("response/ended", "fraction",
        "of the completions that were not cut at the length limit, those whose last token ends "
        "a text: of the tokenizer, or of generation_config.json"),
    Metric("memory/rank_max_gib", "GiB",
        "largest peak memory of any policy rank since it started: what torch allocated on its "
        "GPU, or resident memory of the process on CPU"),
    Metric("memory/device_max_gib", "GiB",
        "on GPUs: most that was in use on any policy rank's GPU at the end of a phase, by all "
        "processes and libraries: an engine that shares it, NCCL's buffers, fragments, CUDA "
        "contexts"),
    Metric("rank/*", "see right",
        "per policy rank: `rank/<n>/time_logprob`, `time_train`, `time_sync` (s, without "
        "waiting for other replicas in the gradient reduction) and `memory_gib` (GiB); "
        "`rank/slowest` and `rank/fullest` name ranks, `rank/slowest_over_mean` is the slowest "
        "rank's time in log-probs and training over the mean of all"),
    Metric("packs/padding_fraction", "fraction",
        "padding in the packs that the policy's ranks computed since the last step (old "
        "log-probs, training): tokens that context and sequence parallelism and FP8 take to cut "
        "packs evenly, and micro-batches without sequences"),
    Metric("packs/shared_fraction", "fraction",
        "tokens of prompts that these ranks did not compute again for another response, of all "
        "tokens of their sequences (megatron.share_prompts_enable)"),
    Metric("loss/sft", "nats",
        "supervised fine-tuning: mean negative log-prob of the tokens of the step that are "
        "trained on"),
    Metric("loss/policy", "loss", "policy loss of the whole batch, mean over the optimizer updates of the step"),
    Metric("loss/clip_fraction", "fraction",
        "completion tokens (gspo and grpo_s: completions) whose probability ratio was clipped"),
    Metric("grad_norm", "norm", "global L2 norm of the gradient before clipping"),
    Metric("lr", "1", "learning rate of the step"),
    Metric("prompts/consumed", "prompts", "prompts taken from the data set since the start of the run"),
    Metric("prompts/skipped_overlong", "prompts", "prompts left out because they are too long, since the start"),
    Metric("weight_sync/probe_diff", "nats",
        "after the sync: difference between an engine's and the policy's log-probs of a fixed "
        "text of the model's own, mean over its tokens, below -5 in proportion; the engine that "
        "differs most"),
    Metric("weight_sync/version", "version", "number of weight updates the rollout engines have received"),
    Metric("weight_sync/seconds", "s", "from the first bucket until the last engine samples from the new weights"),
    Metric("weight_sync/bytes", "bytes", "of one update, that every engine worker receives"),
    Metric("weight_sync/load_seconds", "s",
        "of `weight_sync/seconds`: loading, not waiting; the slowest engine worker"),
    Metric("engines/restarts", "restarts",
        "rollout engines, a guide's included, replaced since the driver was started: a resumed "
        "or restarted run counts from 0"),
    Metric("engines/alive", "engines", "rollout engines, a guide's included, that work: all without vllm.min_engines"),
    Metric("time/generate", "s", "generation of the step's completions, without exposed grading"),
    Metric("time/grade", "s", "grading that generation did not hide; the maximum over the engines"),
    Metric("time/logprob", "s", "old log-probs and entropies (algo.old_logprobs), reference log-probs and values"),
    Metric("time/shape", "s", "advantages and loss weights"),
    Metric("time/train", "s", "forward, backward and optimizer"),
    Metric("time/sync", "s", "sending the weights to the engines, probe included"),
    Metric("time/step", "s", "the whole step"),
    Metric("throughput/tokens_per_second", "tokens/s", "generated tokens over seconds of the whole step"),
    Metric("staleness/mean", "updates",
        "mean over completion tokens of the weight updates between the weights that sampled the "
        "token and those that the policy has when its training begins; 0 in synchronous runs"),
    Metric("staleness/max", "updates", "the same for the token that is furthest behind"),
    Metric("staleness/mixed_fraction", "fraction",
        "completions whose tokens were sampled with more than one version of the weights "
        "(partial rollouts)"),
    Metric("groups/kept_fraction", "fraction",
        "groups of the step over those and the ones that dynamic sampling dropped"),
    Metric("groups/in_flight", "groups", "asked for and not finished when the step ends"),
    Metric("groups/queued", "groups", "finished and waiting for training when the step ends"),
    Metric("groups/dropped_filtered", "groups", "dropped by dynamic sampling since the start: all right or all wrong"),
    Metric("groups/dropped_unstarted", "groups",
        "dropped since the start because an agent's episode failed three times before the "
        "policy had written a word"),
    Metric("groups/dropped_late", "groups",
        "dropped since the start because they lagged by more than `train.max_staleness` "
        "(`train.late_groups drop`)"),
    Metric("groups/dropped_skipped", "groups",
        "left out since the start: a step with these prompts was not accepted "
        "(`train.rollback_on`)"),
    Metric("groups/trained_late", "groups", "groups of the step that lagged by more than `train.max_staleness`"),
    Metric("time/wait_rollouts", "s", "the policy was idle: training waited for groups; part of `time/step`"),
    Metric("time/idle_engines", "s", "the engines were idle: neither generating nor grading, mean over the engines"),
    Metric("time/wait_sync", "s",
        "without partial rollouts: the weight sync waited for the groups in flight; part of "
        "`time/sync`"),
    Metric("update/stream_seconds", "s",
        "rank 0, `ds.adam_offload`: of one update, Adam's states between host memory and GPU "
        "and its arithmetic; mean over the updates of the step"),
    Metric("value/stream_seconds", "s", "the same of the critic"),
    Metric("offload/freed_mib", "MiB",
        "rank 0, `ds.enable_sleep`: device memory that the step's offloads gave back (on CPU: "
        "bytes of storages that could be emptied)"),
    Metric("offload/seconds", "s", "rank 0: moving states to host memory"),
    Metric("offload/reload_seconds", "s", "rank 0: moving them back"),
    Metric("tokens/generated", "tokens", "completion tokens generated in the step"),
    Metric("eval/accuracy", "fraction",
        "share of the sampled completions of the held-out prompts that are right (score of at "
        "least 1): `eval/pass@1`; this and the following are those of the only set without a "
        "name: of named sets each has them as `eval/NAME/accuracy` and so on, and "
        "`eval/accuracy`, `eval/score_mean`, `eval/reward_mean` and `eval/response_length_mean` "
        "are means over the sets, each of the same weight"),
    Metric("eval/accuracy_stderr", "fraction", "standard error of `eval/accuracy` over prompts; 0 for a single prompt"),
    Metric("eval/score_mean", "score",
        "mean score over the same completions: with scores of 0 and 1 the accuracy. It was "
        "called `eval/accuracy` up to version 0.1"),
    Metric("eval/score_mean_stderr", "score",
        "standard error of `eval/score_mean` over prompts; 0 for a single prompt"),
    Metric("eval/response_length_mean", "tokens", "mean completion length on the held-out prompts"),
    Metric("eval/reward_mean", "reward", "mean reward on the held-out prompts"),
    Metric("eval/samples", "completions", "completions sampled for the evaluation"),
    Metric("eval/pass@*", "fraction",
        "`eval/pass@K`, K = powers of two up to n samples: chance that one of K samples is "
        "right (score of at least 1), by the unbiased formula, mean over prompts"),
    Metric("eval/maj@*", "fraction",
        "`eval/maj@K`: chance that the most frequent answer of K samples is right; only of "
        "completions that state answers (`<answer>`, `\\boxed{}`, `####`), which are equal "
        "votes if their normalized texts are"),
    Metric("eval/length_right", "tokens", "mean length of the right completions; missing if there are none"),
    Metric("eval/length_wrong", "tokens", "the same of the wrong ones"),
    Metric("eval/entropy_right", "nats",
        "minus the mean log-prob that the tokens of right completions were sampled with: an "
        "estimate of the entropy of the distribution that was sampled from (temperature and "
        "nucleus of the evaluation); missing at temperature 0"),
    Metric("eval/entropy_wrong", "nats", "the same of the wrong ones"),
    Metric("eval/*", "see above", "of each named set: `eval/NAME/accuracy`, `eval/NAME/pass@K` and so on"),
    Metric("eval_*", "fraction",
        "of a set without a name, for held-out records of several `datasource`: of each the "
        "mean over prompts of the best of N scores and of their mean: `eval_NAME_passN`, "
        "`eval_NAME_pass1`"),
    Metric("eval/loss", "nats", "supervised fine-tuning: `loss/sft` of the held-out examples"),
    Metric("eval/known", "fraction", "supervised fine-tuning: share of the held-out examples that are trained on"),
    Metric("answers/ended", "fraction",
        "supervised fine-tuning: share of the step's answers of which a token that ends a text "
        "is trained (of the tokenizer, or of generation_config.json)"),
    Metric("examples/length_mean", "tokens",
        "supervised fine-tuning: mean length of all examples of the run, the same in every step"),
    Metric("examples/trained_mean", "tokens", "the same of the tokens of an example that are trained on"),
    Metric("examples/repeated", "examples",
        "supervised fine-tuning: examples of the step that were trained in the same pass before"),
    Metric("tokens/trained", "tokens", "supervised fine-tuning: tokens of the step that are trained on"),
    Metric("time/eval", "s", "the evaluation; not part of `time/step`"),
    Metric("time/wait_eval", "s",
        "`eval.async_enable`: the weight sync waited for the evaluation of an earlier step; not "
        "part of `time/step`"),
    Metric("reward_log/*", "the function's", "mean of each key the reward function returns in `extra_logs`"),
    Metric("algorithm/groups", "groups", "prompts whose completions were shaped in the step"),
    Metric("algorithm/degenerate_groups", "fraction",
        "groups without a signal: all completions right or all wrong (or all rewards equal, as "
        "the method defines it)"),
    Metric("algorithm/kept_completions", "fraction", "completions whose group was not dropped as degenerate"),
    Metric("algorithm/active_completions", "fraction",
        "completions that carry loss: kept, and not masked as truncated"),
    Metric("algorithm/success_rate", "fraction",
        "completions that the method counts as successes (reward above `success_threshold`; in "
        "gtpo_conflict: advantage above 0)"),
    Metric("algorithm/right_completions", "fraction",
        "p, the share of completions that are right: a mean over groups with right and wrong "
        "ones, missing without such. Where pools count completions (dapo, grpo, grpo_s) a right "
        "one has the advantage sqrt((1 - p)/p)"),
    Metric("algorithm/right_tokens", "fraction",
        "q, the share of tokens that are in right completions, of the same groups: above p "
        "where right ones are longer. Where pools count tokens (gtpo_entropy without its "
        "entropy) a right one has sqrt((1 - q)/q)"),
    Metric("algorithm/penalised_reward", "reward", "mean reward after length penalties and a KL penalty in the reward"),
    Metric("algorithm/entropy_correct", "nats",
        "mean token entropy of the successes, before the step; missing if there are none"),
    Metric("algorithm/entropy_wrong", "nats", "the same of the failures"),
    Metric("algorithm/advantage_mass_q1", "fraction",
        "share of the sum of absolute advantages on the tokens of fifth 1 of the entropy "
        "distribution (lowest entropies); missing if all advantages are 0"),
    *(Metric(f"algorithm/advantage_mass_q{fifth}", "fraction", f"the same of fifth {fifth}") for fifth in range(2, 6)),
    Metric("algorithm/correction_filtered", "fraction",
        "completion tokens that the importance correction dropped or clamped"),
    Metric("algorithm/rollout_kl", "nats",
        "mean over completion tokens of rollout minus old log-prob; only with an importance "
        "correction"),
    Metric("algorithm/conflict_forward", "fraction",
        "gtpo_conflict: completion tokens in the conflict span from the start"),
    Metric("algorithm/conflict_backward", "fraction",
        "gtpo_conflict: completion tokens in the conflict span towards the end"),
    Metric("conflict/mean", "tokens",
        "gtpo_conflict: mean over completions of the number of tokens in a conflict span, of "
        "either direction (Simoni et al., fig. 5b)"),
    Metric("conflict/prefix_advantage", "1",
        "mean of sum A_i / |o_i| over the completions of a prompt that begin with the same "
        "token, of those beginnings that completions with positive and with negative advantage "
        "share: the weight that GRPO's gradient gives to what they share (Simoni et al., eq. "
        "6); missing if there are none"),
    Metric("conflict/prefix_penalized", "fraction",
        "share of these beginnings where that sum is negative: good completions are the longer "
        "ones, and their beginning is made less likely"),
    Metric("algorithm/filtered_completions", "fraction", "gtpo_conflict: completions removed by the entropy filter"),
    Metric("algorithm/initial_entropy", "nats",
        "gtpo_conflict: mean over completions of their mean token entropy, before training "
        "(step 0)"),
    Metric("algorithm/clip_fraction_high", "fraction",
        "completion tokens that were clipped and have a positive advantage"),
    Metric("algorithm/clip_fraction_low", "fraction",
        "completion tokens that were clipped and have a negative advantage"),
    Metric("algorithm/policy_kl", "nats",
        "mean over loss tokens of old minus new log-prob, in the updates of the step"),
    Metric("algorithm/abs_log_ratio", "nats",
        "mean over loss tokens of the size of new minus old log-prob in the first update of the "
        "step, before which no weight has moved: what a log-prob depends on besides "
        "(`fp8.recipe` current, delayed: the others in its pack); 0 where the old ones are the "
        "update's, the distance to the engine where they are its (algo.old_logprobs)"),
    Metric("algorithm/ref_kl", "nats",
        "mean over loss tokens of the KL estimate in the loss, in the updates of the step"),
    Metric("algorithm/reverse_kl", "nats",
        "on_policy_distillation: mean over completion tokens of the policy's minus the guide's "
        "log-prob"),
    Metric("algorithm/zero_batch_loss", "loss", "mixed_policy_dapo: loss on the groups without a success"),
    Metric("algorithm/optimizer_steps", "updates", "optimizer updates of the step"),
    Metric("algorithm/*", "see the method", "what else an algorithm reports about shaping and loss"),
)
# fmt: on
"""All metrics, in the order of docs/reference/metrics.md."""

_UNITS = {metric.name: metric.unit for metric in METRICS}
_NAMES = frozenset(_UNITS)
_FAMILIES = tuple(metric.name.removesuffix("*") for metric in METRICS if metric.name.endswith("*"))


def is_documented(name: str) -> bool:
    return name in _NAMES or name.startswith(_FAMILIES)


def unit_of(name: str) -> str:
    """'' of a name that stands for a family."""
    return _UNITS.get(name, "")
