"""How answers are sampled and graded: rollouts, vLLM engines, weight sync, rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from openrlhf_ext.options import Float, Int, Section, Violation, added, no_meaning, option

# an option has its default, its meaning and its bounds, as in a table


class Speculative(Section):
    """Drafts for rollouts: something cheap guesses the next tokens, and one step of the model checks
    all of them. Tokens and log-probs stay the policy's (rejection sampling)."""

    needs = {
        "vllm.speculative.method!=none": ("num_tokens",),
        "vllm.speculative.method=eagle3": ("path",),
    }

    method: Literal["none", "ngram", "eagle3"] = added(
        "none",
        "what drafts tokens in the rollout engines: ngram = what followed the same last 2 to 5 "
        "tokens earlier in the text; eagle3 = the EAGLE-3 head of vllm.speculative.path, which "
        "training leaves as it is; none = nothing",
    )
    num_tokens: Int = added(3, "most tokens of one draft", ge=1, le=16)
    path: str | None = added(
        None,
        "folder of an EAGLE-3 head for the policy's model (config.json and safetensors)",
        path="input",
    )

    def violations(self) -> Iterator[Violation]:
        if self.method == "eagle3" and self.path is None:
            yield Violation(
                ("vllm.speculative.method", "vllm.speculative.path"),
                "vllm.speculative.method eagle3 needs a head: got no vllm.speculative.path; set it "
                "to the folder of an EAGLE-3 head, or use vllm.speculative.method ngram",
            )


class Vllm(Section):
    """The rollout engines."""

    needs = {"ds.lora.rank | ds.lora.path": ("lora",)}

    num_engines: Int = option(
        1, "vLLM engines; each has its own GPUs (processes on CPU)", ge=1, le=2**13
    )
    min_engines: Int | None = added(
        None,
        "fewest engines the run goes on with: it does not wait while a dead or hung engine is "
        "replaced; the new one joins when there is room for it (docs/weight_sync.md)",
        ge=1,
        default_text="vllm.num_engines",
    )
    tensor_parallel_size: Int = option(1, "GPUs per engine (processes on CPU)", ge=1)
    sync_backend: Literal["auto", "nccl", "cuda_ipc", "gloo"] = option(
        "auto",
        "how weights reach the engines: gloo = through host memory, on any device; nccl = between "
        "GPUs; cuda_ipc = on GPUs that policy and engines share (train.colocate_all); auto = nccl "
        "or cuda_ipc on GPUs, gloo on CPU and instead of nccl with train.full_determinism_enable",
    )
    sync_with_ray: bool = no_meaning(
        False,
        "send weights through Ray's collective group",
        why="weights travel in packed buckets over a torch process group",
        instead="use vllm.sync_backend",
    )
    lora: Literal["adapter", "merged"] = added(
        "adapter",
        "with ds.lora.*, what a weight sync sends: the adapter, which vLLM applies to the base "
        "model it loaded, or the weights with the adapter merged",
    )
    enable_prefix_caching: bool = option(
        False,
        "reuse the KV cache of common prompt prefixes; cleared after every weight sync; "
        "train.routing_replay rollout needs it",
    )
    enforce_eager: bool = option(
        False, "run the engines without CUDA graphs (slower, starts faster)"
    )
    max_cudagraph_capture_size: Int | None = added(
        None,
        "largest decoding step, in requests, with a CUDA graph; larger steps run without one; no "
        "effect on CPU",
        ge=1,
        default_text="vLLM's default: twice vllm.max_num_seqs, at most 512 on Hopper",
    )
    enable_sleep: bool = option(
        False,
        "with train.colocate_all: the engines release their memory while the policy trains; no "
        "effect on CPU",
    )
    gpu_memory_utilization: Float | None = option(
        None,
        "share of a GPU's memory that an engine may use; no effect on CPU (see vllm.kv_cache_mib)",
        gt=0,
        le=1,
        default_text="0.95; 0.8 with train.colocate_all, where the policy keeps some memory for itself",
    )
    dtype: Literal["auto", "bf16", "fp32"] = added(
        "auto", "data type of the engines' weights and activations; auto = megatron.param_dtype"
    )
    max_num_seqs: Int | None = added(
        None,
        "requests that an engine processes at a time",
        ge=1,
        default_text="1024 on GPU, 256 on CPU",
    )
    max_requests: Int | None = added(
        None,
        "responses requested from an engine at a time; the rest wait in the driver for the first "
        "free engine",
        ge=1,
        default_text="vllm.max_num_seqs",
    )
    max_num_batched_tokens: Int | None = added(
        None,
        "tokens that an engine computes in one step; on CPU at least data.max_len",
        ge=1,
        default_text="8192 on GPU; on CPU 4096, or data.max_len if that is more",
    )
    kv_cache_mib: Int = added(
        64, "KV cache per engine when it runs on CPU, MiB; no effect on GPU", ge=1, le=2**20
    )
    start_timeout_s: Float = added(
        600,
        "longest wait for processes to be placed and for all engines to be ready, seconds",
        gt=0,
    )
    max_restarts: Int = added(
        3,
        "how many times in a run dead or hung engines are restarted and their prompts sampled "
        "again; 0 = the run stops at the first one; engines that vllm.min_engines does not wait "
        "for are not counted",
        ge=0,
    )
    hang_timeout_s: Float = added(
        300,
        "time without an answer, outside weight syncs, after which an engine counts as hung, "
        "seconds",
        gt=0,
    )
    speculative: Speculative = Speculative()

    def violations(self) -> Iterator[Violation]:
        """A step of an engine has at least one token of every sequence; what is not set gives way
        to what is."""
        if self.min_engines is not None and self.min_engines > self.num_engines:
            yield Violation(
                ("vllm.min_engines", "vllm.num_engines"),
                f"vllm.min_engines must not exceed vllm.num_engines: got {self.min_engines} and "
                f"{self.num_engines}; lower it, or leave it out",
            )
        if self.enforce_eager and self.max_cudagraph_capture_size is not None:
            yield Violation(
                ("vllm.max_cudagraph_capture_size", "vllm.enforce_eager"),
                f"vllm.max_cudagraph_capture_size is {self.max_cudagraph_capture_size}, but "
                "vllm.enforce_eager switches CUDA graphs off: leave one of them out",
            )
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if sequences is not None and tokens is not None and tokens < sequences:
            yield Violation(
                ("vllm.max_num_batched_tokens", "vllm.max_num_seqs"),
                f"vllm.max_num_batched_tokens must be at least vllm.max_num_seqs: got {tokens} "
                f"and {sequences}; set only one of them",
            )


class WeightSync(Section):
    """How the policy hands its weights to the engines after every step."""

    bucket_mib: Int = added(
        512,
        "size of one packed bucket of weights, MiB; each side holds two at a time",
        ge=1,
        le=2**20,
    )
    timeout_s: Float = added(300, "longest time one weight sync may take, seconds", gt=0)
    probe_tolerance: Float | None = added(
        None,
        "largest difference between the policy's and an engine's log-probs that counts as "
        "rounding: mean over the tokens of a text from the model itself, nats, relative below -5; "
        "a larger one ends the run. Later, one above a quarter of this plus three times the "
        "initial difference causes a warning",
        gt=0,
        default_text="1e-4 in fp32, 0.1 in bf16, 0.4 with FP8 and of a mixture of experts in bf16",
    )
    probe_length: Int | None = added(
        None,
        "maximum length of the fixed text compared after every sync, tokens; at most half of it "
        "is from the first prompt; more than a cache block (16 on GPU, 128 on CPU) plus 16 tests "
        "the prefix cache too",
        ge=2,
        default_text="160, or data.max_len - 1 if that is less",
    )


class PenaltyFormula(Section):
    """A penalty on long responses, for ``reward.length_penalty`` and an estimator's own option.
    Lengths are in tokens."""

    read_by: ClassVar[dict[str, tuple[str, ...]]] = {
        "dapo": ("l_max", "l_cache", "factor"),
        "tan_v1": ("L1", "L2", "denominator"),
    }

    kind: Literal["none", "dapo", "tan_v1", "grop"] = added(
        "none",
        "formula of the penalty on long responses; sets length_penalty of any estimator",
    )
    on: Literal["all", "correct", "incorrect"] = added("all", "completions that it can penalize")
    l_max: Int | None = added(None, "dapo: maximum length, tokens", gt=0)
    l_cache: Int | None = added(None, "dapo: length of the soft interval, tokens", gt=0)
    factor: Float = added(1.0, "dapo: scale of the penalty", ge=0)
    L1: Int | None = added(None, "tan_v1: shorter length, tokens", gt=0)
    L2: Int | None = added(None, "tan_v1: longer length, tokens", gt=0)
    denominator: Literal["L2", "L1"] = added("L2", "tan_v1: slope denominator")

    def broken(self) -> Iterator[Violation]:
        """Rules of the formula, by the names of its own fields."""
        needed = {"dapo": ("l_max", "l_cache"), "tan_v1": ("L1", "L2")}.get(self.kind, ())
        if missing := [name for name in needed if getattr(self, name) is None]:
            yield Violation(
                tuple(missing), f"length_penalty kind {self.kind!r} requires {', '.join(missing)}"
            )
        if self.kind == "tan_v1" and self.L1 and self.L2 and self.L2 <= self.L1:
            yield Violation(
                ("L1", "L2"), f"length_penalty requires L2 > L1, got L1 = {self.L1}, L2 = {self.L2}"
            )
        if self.kind == "dapo" and self.l_max and self.l_cache and self.l_cache > self.l_max:
            yield Violation(
                ("l_cache", "l_max"),
                f"length_penalty requires l_cache <= l_max, got {self.l_cache} > {self.l_max}",
            )


_PENALTY = "reward.length_penalty"


class RewardLengthPenalty(PenaltyFormula):
    """The penalty on long responses, for any estimator."""

    needs = {
        f"{_PENALTY}.kind!=none": ("on",),
        f"{_PENALTY}.kind=grop": ("grop_gamma1", "grop_medium_else"),
        **{f"{_PENALTY}.kind={kind}": leaves for kind, leaves in PenaltyFormula.read_by.items()},
    }

    grop_gamma1: Float | None = added(
        None,
        "grop: share of correct completions of an easy prompt",
        gt=0,
        lt=1,
        default_text="the estimator's value, 0.75",
    )
    grop_medium_else: Literal["none", "incorrect"] | None = added(
        None,
        "grop: which completions of a medium prompt with n <= m are penalized",
        default_text="the estimator's value, none",
    )

    def violations(self) -> Iterator[Violation]:
        for violation in self.broken():
            yield Violation(
                tuple(f"{_PENALTY}.{leaf}" for leaf in violation.options),
                f"reward.{violation.message}",
            )


class Reward(Section):
    """Where rewards come from, and what happens when grading fails."""

    needs = {
        "reward.overlong_buffer_len": ("overlong_penalty_factor",),
        "reward.model_name_or_path": ("num_nodes", "num_gpus_per_node", "offload"),
        "reward.model_name_or_path | algo.advantage.estimator=gae": ("normalize_enable",),
    }

    num_nodes: Int = option(1, "nodes of the reward model", ge=1, le=2**13)
    num_gpus_per_node: Int = option(
        8,
        "reward model ranks per node: one per GPU, or one per process on CPU; in the policy's "
        "layout",
        ge=1,
        le=2**8,
    )
    normalize_enable: bool = option(
        False,
        "subtract the mean and divide by the std in config.json: rewards of the reward model, and "
        "values of the critic with those of its own checkpoint; no effect if config.json has none",
    )
    clip_range: tuple[Float, Float] | None = option(
        None,
        "LOW HIGH: range that rewards are clipped to after the estimator's baseline; sets its "
        "reward_clip",
        default_text="-10 10 with OpenRLHF's own estimators",
    )
    overlong_buffer_len: Float | None = option(
        None,
        "length of the soft punishment zone before rollout.max_new_tokens, tokens (whole "
        "number); null = no penalty; sets length_penalty of the estimator (DAPO eq. 13)",
        ge=1,
    )
    overlong_penalty_factor: Float = option(
        1,
        "penalty at rollout.max_new_tokens, in units of reward; needs reward.overlong_buffer_len",
        gt=0,
    )
    length_penalty: RewardLengthPenalty = RewardLengthPenalty()
    stop_properly_penalty_coef: Float | None = option(
        None,
        "reward of truncated responses: multiplied by this (0 to 1), or set to this if it is "
        "negative; null = unchanged; sets stop_properly of the estimator",
        le=1,
    )
    model_name_or_path: str | None = option(
        None,
        "folder or hub name of a reward model (a sequence classifier with one label and the "
        "policy's tokens), which scores whole batches instead of reward.remote_url or an agent "
        "(docs/algorithms.md)",
        path="input",
    )
    remote_url: str | None = option(
        None,
        "what grades responses: a .py file that defines reward_func(queries, prompts, labels), "
        "optionally with the argument completions, or a function in verl's or TRL's form "
        "(docs/migration.md); or the http(s) URLs of reward servers, separated by commas",
        path="input",
    )
    offload: bool = option(
        False, "keep the reward model's weights in host memory while it has nothing to score"
    )
    timeout_s: Float = added(
        30,
        "time limit, seconds: for a call of the reward function (per completion in the call), a "
        "request to a reward server, or what an agent awaits between two generations",
        gt=0,
    )
    max_failures: Int = added(
        10,
        "failed gradings (exception, NaN, timeout) per engine after which the run stops; each is "
        "reported",
        ge=0,
    )
    failure_value: Float = added(0.0, "reward of a response whose grading failed")
    num_workers: Int = added(2, "grader processes per engine, for reward functions", ge=1, le=2**8)
    memory_mib: Int = added(
        4096,
        "private memory limit of a grader process, MiB; a call of the reward function that needs "
        "more fails",
        ge=64,
        le=2**20,
    )
    environment: tuple[str, ...] = added(
        (),
        "names of environment variables that grader processes get besides the common ones (PATH, "
        "HOME, LANG, ...) and REWARD_*; they do not get other variables, such as keys and tokens",
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """What stands between the commas of ``remote_url``."""
        return tuple(url.strip() for url in (self.remote_url or "").split(",") if url.strip())

    def violations(self) -> Iterator[Violation]:
        buffer = self.overlong_buffer_len
        if buffer is not None and buffer != int(buffer):
            yield Violation(
                ("reward.overlong_buffer_len",),
                f"reward.overlong_buffer_len must be a whole number of tokens: got {buffer:g}",
            )


class Rollout(Section):
    """One batch of rollouts."""

    needs = {
        "algo.dynamic_filtering_enable": ("max_filter_batches",),
        "!train.dynamic_batch_enable": ("micro_batch_size",),
    }

    max_tokens_per_gpu: Int | None = option(
        None,
        "with train.dynamic_batch_enable: tokens of a micro-batch on one rank when log-probs "
        "are computed",
        ge=1,
        default_text="train.max_tokens_per_gpu",
    )
    batch_size: Int = option(1024, "prompts per batch of rollouts", ge=1)
    vllm_generate_batch_size: Int | None = option(
        None,
        "prompts per call to the engines; only rollout.batch_size is supported",
        ge=1,
        default_text="rollout.batch_size",
    )
    micro_batch_size: Int = option(
        1, "samples per forward pass and rank when log-probs are computed", ge=1, le=2**16
    )
    max_new_tokens: Int | None = option(
        None,
        "longest response, tokens",
        ge=1,
        default_text="what data.max_len leaves after the prompt",
    )
    top_p: Float = option(
        1.0,
        "nucleus sampling threshold; below 1 the engines sample from another distribution than "
        "the policy trains",
        gt=0,
        le=1,
    )
    temperature: Float = option(
        1.0, "sampling temperature; log-probs and entropies use it too", gt=0
    )
    n_samples_per_prompt: Int = option(1, "responses per prompt (size of a group)", ge=1, le=2**16)
    timeout_s: Float = added(1800, "longest wait for one batch of rollouts, seconds", gt=0)
    max_filter_batches: Int = added(
        10,
        "with algo.dynamic_filtering_enable: most prompts sampled for one step, in multiples of "
        "rollout.batch_size, before the run stops with an error",
        ge=1,
    )

    def cautions(self) -> Iterator[str]:
        if self.top_p < 1:
            yield (
                f"rollout.top_p {self.top_p:g} < 1: the engines sample from a truncated "
                "distribution, but the policy trains the full one, so ratios are biased; 1.0 is "
                "on-policy"
            )
