"""Fifty silent bugs that were published, each as a replacement of a function of ours in the process
where it would be.

A fault's ``patches`` run in that process. Names of issues are ``owner#number`` as on GitHub, or an
arXiv number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.silent.lab import Fault

FAULTS: list[Fault] = []


def fault(issue: str, what: str, at: str, **more: Any) -> Callable[[Callable], Callable]:
    def keep(patches: Callable) -> Callable:
        FAULTS.append(Fault(patches.__name__, issue, what, at, patches, **more))
        return patches

    return keep


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """``change(original, *arguments)`` in the place of a function."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return patch.object(owner, name, replaced)


def wrapped_method(owner: type, name: str, change: Callable[..., Any]) -> Any:
    """The same of a method: ``change`` gets the object too."""
    original = getattr(owner, name)
    return patch.object(
        owner, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs)
    )


def wrapped_async(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    async def replaced(*args: Any, **kwargs: Any) -> Any:
        return await change(original, *args, **kwargs)

    return patch.object(owner, name, replaced)


# ---- weights on their way to the engines


def loads_otherwise(engine: Any, change: Callable[[dict, dict], dict]) -> Any:
    """An engine worker that loads ``change(sent, before)`` in the place of what was sent."""
    from openrlhf_ext.rollout.worker_extension import WeightSyncExtension

    before: dict[str, torch.Tensor] = {}

    def load(original: Any, self: Any, stream: Any) -> Any:
        sent = {name: tensor.clone() for name, tensor in stream}
        loaded = change(sent, dict(before) or sent)
        before.update(sent)
        return original(self, iter(loaded.items()))

    return wrapped_method(WeightSyncExtension, "_load", load)


@fault("trl#5312", "the engine keeps the weights of the update before", "engine")
def stale_weights(engine: Any) -> list[Any]:
    return [loads_otherwise(engine, lambda sent, before: before)]


@fault("SkyRL#1680", "half of the tensors of an update are not loaded", "engine")
def half_an_update(engine: Any) -> list[Any]:
    return [
        loads_otherwise(
            engine,
            lambda sent, before: {
                name: (sent if number % 2 else before)[name] for number, name in enumerate(sent)
            },
        )
    ]


@fault("unsloth-zoo#941", "up_proj gets the weights of gate_proj", "engine")
def gate_twice(engine: Any) -> list[Any]:
    return [
        loads_otherwise(
            engine,
            lambda sent, _: {name: sent[name.replace("up_proj", "gate_proj")] for name in sent},
        )
    ]


@fault("Megatron-Bridge#2381", "the rows of a shard come in another order", "engine")
def swapped_shards(engine: Any) -> list[Any]:
    return [
        loads_otherwise(
            engine,
            lambda sent, _: {
                name: tensor.roll(len(tensor) // 2, 0) if name.endswith("o_proj.weight") else tensor
                for name, tensor in sent.items()
            },
        )
    ]


@fault("vllm#42821", "the output layer is left out of updates", "engine")
def no_output_layer(engine: Any) -> list[Any]:
    return [
        loads_otherwise(
            engine,
            lambda sent, before: sent | {name: before[name] for name in sent if "lm_head" in name},
        )
    ]


@fault(
    "miles#2722",
    "weights are rounded to bf16 on their way to an engine that computes in fp32",
    "engine",
)
def rounded_on_the_way(engine: Any) -> list[Any]:
    return [
        loads_otherwise(
            engine,
            lambda sent, _: {
                name: tensor.bfloat16().to(tensor.dtype) for name, tensor in sent.items()
            },
        )
    ]


@fault("NeMo-RL#4018", "the prefix cache outlives an update", "engine")
def stale_prefix_cache(engine: Any) -> list[Any]:
    async def nothing(*_: Any) -> None:
        return None

    return [patch.object(type(engine), "reset_prefix_cache", nothing)]


# ---- sampling


def samples_otherwise(engine: Any, **change: Any) -> list[Any]:
    def params(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        for name, value in change.items():
            setattr(made, name, value(getattr(made, name)) if callable(value) else value)
        return made

    return [wrapped(engine, "sampling_params", params)]


@fault("trl#4159", "the engine samples at temperature 1, the policy scores at 0.9", "engine")
def another_temperature(engine: Any) -> list[Any]:
    return samples_otherwise(engine, temperature=1.0)


@fault(
    "trl#6789",
    "top_p 0.9 in the engine, whose log-probs are renormalized; the policy does not know",
    "engine",
)
def top_p_in_the_engine(engine: Any) -> list[Any]:
    return samples_otherwise(engine, top_p=0.9)


@fault(
    "verl#6240", "log-probs that the engine reports are of logits before the temperature", "engine"
)
def raw_logprobs(engine: Any) -> list[Any]:
    return [
        _responses(
            engine, lambda r: dataclasses.replace(r, logprobs_T=r.logprobs_T * np.float32(0.9))
        )
    ]


@fault("trl#2824", "all completions of a prompt are sampled with the same seed", "engine")
def one_seed(engine: Any) -> list[Any]:
    return samples_otherwise(engine, seed=lambda _: 7)


@fault("OpenRLHF#393", "the beginning of text is there twice", "engine")
def beginning_twice(engine: Any) -> list[Any]:
    return [_prompts(engine, lambda ids: [1, 1, *ids])]


@fault("NeMo-RL#855", "the chat template is applied twice", "engine")
def template_twice(engine: Any) -> list[Any]:
    return [_prompts(engine, lambda ids: [*ids, *ids[-6:]])]


@fault("verl#5821", "prompts lose their first tokens to a length limit", "engine")
def cut_prompts(engine: Any) -> list[Any]:
    return [_prompts(engine, lambda ids: ids[2:])]


def _prompts(engine: Any, change: Callable[[list[int]], list[int]]) -> Any:
    """Other tokens of prompts, for engine, grader, and policy alike."""
    tokenizer = engine._tokenizer

    class Other:
        def __call__(self, text: str, **more: Any) -> Any:
            return {"input_ids": change(list(tokenizer(text, **more)["input_ids"]))}

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    return patch.object(engine, "_tokenizer", Other())


def _responses(engine: Any, change: Callable[[Any], Any]) -> Any:
    async def respond(original: Any, *args: Any) -> Any:
        return [change(response) for response in await original(*args)]

    return wrapped_async(engine.executor, "respond", respond)


@fault("trl#6357", "the token that ends a completion is not trained", "engine")
def no_end(engine: Any) -> list[Any]:
    def cut(response: Any) -> Any:
        if response.truncated or response.sampled < 2:
            return response
        (start, stop) = response.actions[0]
        versions = tuple((v, a, min(b, stop - 1)) for v, a, b in response.versions)
        return dataclasses.replace(
            response,
            tokens_S=response.tokens_S[:-1],
            logprobs_T=response.logprobs_T[:-1],
            actions=((start, stop - 1),),
            versions=versions,
        )

    return [_responses(engine, cut)]


@fault("trl#7039", "a completion that ended counts as truncated", "engine")
def all_truncated(engine: Any) -> list[Any]:
    return [_responses(engine, lambda r: dataclasses.replace(r, truncated=True))]


# ---- rewards


@fault("R1-V#146", "the label is that of the prompt before", "engine")
def label_of_another(engine: Any) -> list[Any]:
    last = ["#### 0"]

    async def respond(original: Any, request: Any, *args: Any) -> Any:
        label, last[0] = last[0], request.label
        return await original(dataclasses.replace(request, label=label), *args)

    return [wrapped_async(engine.executor, "respond", respond)]


@fault("verl#2185", "a completion gets its neighbor's reward", "engine")
def neighbors_reward(engine: Any) -> list[Any]:
    async def respond(original: Any, *args: Any) -> Any:
        made = await original(*args)
        return [
            dataclasses.replace(r, reward=n.reward, score=n.score)
            for r, n in zip(made, [*made[1:], made[0]], strict=True)
        ]

    return [wrapped_async(engine.executor, "respond", respond)]


@fault("verl#2185", "rewards keep the order of arrival while the batch is sorted", "driver")
def rewards_in_another_order(loop: Any) -> list[Any]:
    from openrlhf_ext.driver import experience

    def batch(original: Any, *args: Any) -> Any:
        made = original(*args)
        return dataclasses.replace(made, rewards=made.rewards.roll(1))

    return [wrapped(experience, "rollout_batch", batch)]


@fault("trl#5281", "the grader's exception counts as reward 0", "engine")
def failures_are_zero(engine: Any) -> list[Any]:
    def half(response: Any) -> Any:
        failed = response.tokens_S.sum() % 2
        return dataclasses.replace(response, reward=0.0, score=0.0) if failed else response

    return [_responses(engine, half)]


@fault("PipelineRL#54", "mean and deviation of a group are those of its first completion", "driver")
def baseline_of_the_first(loop: Any) -> list[Any]:
    return [_advantages(loop, lambda a_B, r_B: (r_B.view(-1, 8) - r_B.view(-1, 8)[:, :1]).view(-1))]


@fault("slime#1918", "rewards are normalized over the whole batch", "driver")
def baseline_of_the_batch(loop: Any) -> list[Any]:
    return [_advantages(loop, lambda a_B, r_B: (r_B - r_B.mean()) / r_B.std())]


@fault("trl#3842", "groups are cut one completion too late", "driver")
def shifted_groups(loop: Any) -> list[Any]:
    def batch(original: Any, *args: Any) -> Any:
        made = original(*args)
        return dataclasses.replace(made, group_ids=made.group_ids.roll(1))

    from openrlhf_ext.driver import experience

    return [wrapped(experience, "rollout_batch", batch)]


@fault("Seg-Zero#104", "no division by the deviation of a group", "driver")
def no_deviation(loop: Any) -> list[Any]:
    return [
        _advantages(
            loop,
            lambda a_B, r_B: (r_B.view(-1, 8) - r_B.view(-1, 8).mean(1, keepdim=True)).view(-1),
        )
    ]


@fault("tt-metal#46548", "advantages belong to other rows than log-probs", "driver")
def advantages_of_other_rows(loop: Any) -> list[Any]:
    return [_advantages(loop, lambda a_B, _: a_B.roll(3))]


def _advantages(loop: Any, change: Callable[..., torch.Tensor]) -> Any:
    """Other (B,) advantages than the method's, in the batch that leaves for the ranks."""

    def shape(original: Any, batch: Any) -> Any:
        made = original(batch)
        a_B = change(made.advantages[made.segments.lengths_B.cumsum(0) - 1], batch.rewards)
        seq = None if made.seq_advantages is None else a_B.double()
        return dataclasses.replace(
            made, advantages=made.segments.spread(a_B).to(made.advantages.dtype), seq_advantages=seq
        )

    return wrapped_method(
        type(loop.experience.algorithm),
        "shape",
        lambda original, self, batch: shape(lambda b: original(self, b), batch),
    )


# ---- log-probs


def head_otherwise(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    from openrlhf_ext.megatron.policy import MegatronPolicy

    return wrapped_method(
        MegatronPolicy, "_head_arguments", lambda original, *args: change(original(*args))
    )


@fault("trl#3029", "the policy scores at temperature 1", "rank")
def no_temperature(actor: Any) -> list[Any]:
    return [head_otherwise(lambda arguments: arguments | {"temperature": 1.0})]


@fault("prime-rl#1525", "log-probs are of the token before", "rank")
def shifted_by_one(actor: Any) -> list[Any]:
    return [
        head_otherwise(lambda arguments: arguments | {"target_T": arguments["target_T"].roll(1)})
    ]


@fault("arXiv 2506.13585", "the output layer computes in bf16", "rank")
def logits_in_bf16(actor: Any) -> list[Any]:
    return [head_otherwise(lambda a: a | {"weight_VH": _rounded(a["weight_VH"])})]


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    rounded = weight.detach().bfloat16().float().requires_grad_(weight.requires_grad)
    rounded.main_grad = getattr(weight, "main_grad", None)  # type: ignore[attr-defined]
    return rounded


@fault("verl#2656", "a fused kernel counts columns of padding: log-probs are too low", "rank")
def padded_vocabulary(actor: Any) -> list[Any]:
    from openrlhf_ext.megatron.policy import MegatronPolicy

    def collect(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return made._replace(logprobs_N=made.logprobs_N - 0.003)

    return [wrapped_method(MegatronPolicy, "logprobs", collect)]


@fault("axolotl#131", "sequences of a pack see each other", "rank")
def packs_leak(actor: Any) -> list[Any]:
    from openrlhf_ext.megatron.step import schedule

    def packs(original: Any, part: Any, fusion: Any) -> Any:
        ends = part.boundaries
        merged = torch.stack([ends[0], ends[-1]])
        return original(
            dataclasses.replace(part, boundaries=merged, slots=(sum(part.slots),), shared=None),
            fusion,
        )

    return [wrapped(schedule, "packed_sequences", packs), _no_shared_prompts(actor)]


@fault("LlamaFactory#7318", "positions of a packed sequence are wrong", "rank")
def wrong_positions(actor: Any) -> list[Any]:
    from openrlhf_ext.megatron.step import schedule

    def pack(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return dataclasses.replace(made, positions_L=made.positions_L.clamp(max=16))

    return [wrapped(schedule, "pack", pack), _no_shared_prompts(actor)]


def _no_shared_prompts(actor: Any) -> Any:
    from openrlhf_ext.megatron.step.schedule import Schedule

    return patch.object(
        Schedule,
        "_pack_shape",
        property(
            lambda self, old=Schedule._pack_shape: dataclasses.replace(
                old.fget(self), shares_prompts=False
            )
        ),
    )


@fault("JustRL#5", "entropies are not put back into the order of the batch", "driver")
def entropies_in_another_order(loop: Any) -> list[Any]:
    def rows(original: Any, *args: Any) -> Any:
        made = original(*args)
        return made._replace(entropies_N=made.entropies_N.flip(0))

    return [wrapped(loop.experience, "_of_rows", rows)]


# ---- loss and gradient


def loss_otherwise(change: Callable[[Any, Any], float]) -> list[Any]:
    """The loss of a micro-batch times ``change(part, shaped)``, by the weights of its
    completions."""
    from openrlhf_ext.megatron.policy import MegatronPolicy

    def loss(original: Any, self: Any, part: Any, states: Any, shaped: Any, algorithm: Any) -> Any:
        factor = change(part, shaped)
        return original(
            self,
            part,
            states,
            dataclasses.replace(shaped, weights=shaped.weights * factor),
            algorithm,
        )

    return [wrapped_method(MegatronPolicy, "_loss", loss)]


@fault("verl#623", "micro-batches are averaged, each over its own tokens", "rank")
def mean_of_means(actor: Any) -> list[Any]:
    return loss_otherwise(lambda part, shaped: 21.0 * len(shaped) / part.response_tokens)


@fault("NeMo-RL#84", "the gradient grows with the number of micro-batches", "rank")
def times_micro_batches(actor: Any) -> list[Any]:
    return loss_otherwise(lambda part, shaped: 4.0)


@fault("Megatron-LM#906", "the loss is scaled by the context-parallel size", "rank")
def times_two(actor: Any) -> list[Any]:
    return loss_otherwise(lambda part, shaped: 2.0)


@fault("DeepSpeed#7967", "only the last micro-batch reaches the optimizer", "rank")
def last_micro_batch_only(actor: Any) -> list[Any]:
    return loss_otherwise(lambda part, shaped: float(part.rows.stop >= 64))


@fault("trl#7047", "the last micro-batch is left out", "rank")
def no_last_micro_batch(actor: Any) -> list[Any]:
    return loss_otherwise(lambda part, shaped: float(part.rows.stop < 64))


def kl_otherwise(actor: Any, change: Callable[[float], float]) -> Any:
    def take(original: Any, shard: Any) -> Any:
        for mini in shard.mini_batches:
            mini.algorithm = mini.algorithm.with_kl_coef(change(mini.algorithm.penalty.coef))
        return original(shard)

    return wrapped(actor, "take_shard", take)


@fault("OpenRLHF#773", "the KL penalty is left out of the loss", "rank")
def no_kl(actor: Any) -> list[Any]:
    return [kl_otherwise(actor, lambda coef: 0.0)]


@fault("Logic-RL#58", "the KL penalty is maximized", "rank")
def kl_maximized(actor: Any) -> list[Any]:
    return [kl_otherwise(actor, lambda coef: -coef)]


@fault("theLMbook#8", "the reference is the policy itself", "rank")
def reference_is_the_policy(actor: Any) -> list[Any]:
    def logprobs(original: Any, name: str, batch: Any) -> Any:
        copies, actor.host_copies = actor.host_copies, {}
        try:
            return original(name, batch)
        finally:
            actor.host_copies = copies

    return [wrapped(actor, "_frozen_logprobs", logprobs)]


@fault("gpt-neox#1285", "the first token of a completion carries no loss", "rank")
def first_token_masked(actor: Any) -> list[Any]:
    return [_shards(actor, _without_first)]


def _without_first(mini: Any) -> Any:
    mask_N = mini.loss_mask.clone()
    mask_N[mini.segments.lengths_B.cumsum(0) - mini.segments.lengths_B] = False
    return dataclasses.replace(mini, loss_mask=mask_N)


@fault("slime#774", "old log-probs are not those of the batch", "rank")
def old_logprobs_of_others(actor: Any) -> list[Any]:
    return [
        _shards(
            actor, lambda mini: dataclasses.replace(mini, old_logprobs=mini.old_logprobs.roll(1))
        )
    ]


@fault("verl#6452", "advantages on the ranks are those of the row before", "rank")
def advantages_shifted_on_ranks(actor: Any) -> list[Any]:
    return [
        _shards(actor, lambda mini: dataclasses.replace(mini, advantages=mini.advantages.roll(20)))
    ]


def _shards(actor: Any, change: Callable[[Any], Any]) -> Any:
    def take(original: Any, shard: Any) -> Any:
        return original(
            dataclasses.replace(shard, mini_batches=[change(mini) for mini in shard.mini_batches])
        )

    return wrapped(actor, "take_shard", take)


# ---- optimizer


def frozen(actor: Any, part: str) -> Any:
    """Parameters whose name has ``part`` are after an optimizer step what they were before it."""

    def step(original: Any, *args: Any) -> Any:
        kept = [
            (p, p.detach().clone())
            for chunk in actor.policy.chunks
            for name, p in chunk.named_parameters()
            if part in name
        ]
        made = original(*args)
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)
        return made

    return wrapped(actor.policy, "optimizer_step", step)


@fault("verl-omni#552", "a layer is not trained", "rank")
def frozen_layer(actor: Any) -> list[Any]:
    return [frozen(actor, "layers.2.")]


@fault("speculators#765", "norms never move: their steps are lost in bf16", "rank")
def frozen_norms(actor: Any) -> list[Any]:
    return [frozen(actor, "norm")]


@contextmanager
def _rounding(actor: Any) -> Iterator[None]:
    original = actor.policy.optimizer_step

    def step(*args: Any) -> Any:
        made = original(*args)
        round_weights(actor)
        return made

    with patch.object(actor.policy, "optimizer_step", step):
        yield


@fault("AReaL#1634", "no fp32 master weights: steps are rounded to bf16", "rank")
def no_master_weights(actor: Any) -> list[Any]:
    return [_rounding(actor)]


@fault("mala#374", "the learning rate is ten times what it says", "rank")
def another_learning_rate(actor: Any) -> list[Any]:
    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        groups = actor.policy.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= 10
        made = original(*args, **kwargs)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return made

    return [wrapped(actor.policy.optimizer, "step", step)]


@fault("OpenRLHF#660", "the optimizer step moves nothing", "rank")
def no_update(actor: Any) -> list[Any]:
    return [frozen(actor, "")]


def after_loading(actor: Any, change: Callable[[Any], None]) -> Any:
    """Ray calls an actor's own methods as they were when it started: what they call is replaced."""
    from openrlhf_ext.megatron import checkpoint

    def load(original: Any, *args: Any) -> Any:
        extra = original(*args)
        change(actor)
        return extra

    return wrapped(checkpoint, "load_checkpoint", load)


@fault("NeMo-RL#3171", "Adam's moments are lost when a run goes on", "rank", resumes=True)
def moments_lost(actor: Any) -> list[Any]:
    return [after_loading(actor, lose_moments)]


def lose_moments(actor: Any) -> None:
    from openrlhf_ext.megatron.checkpoint import optimizer_ranges

    for held in optimizer_ranges(actor.policy.optimizer).values():
        for name in ("exp_avg", "exp_avg_sq"):
            held.tensors[name].zero_()


@fault("SkyRL#1403", "Adam counts its steps from 0 when a run goes on", "rank", resumes=True)
def adam_step_lost(actor: Any) -> list[Any]:
    def lose(actor: Any) -> None:
        from openrlhf_ext.megatron.checkpoint import set_optimizer_step

        set_optimizer_step(actor.policy.optimizer, 0)

    return [after_loading(actor, lose)]


@fault("prime-rl#1095", "the schedule of the learning rate begins anew", "rank", resumes=True)
def schedule_lost(actor: Any) -> list[Any]:
    def lose(actor: Any) -> None:
        actor.policy.scheduler.num_steps = 0

    return [after_loading(actor, lose)]


@fault("OpenTau#185", "weights go through bf16 when a run goes on", "rank", resumes=True)
def weights_rounded_on_resume(actor: Any) -> list[Any]:
    return [after_loading(actor, round_weights)]


def round_weights(actor: Any) -> None:
    with torch.no_grad():
        for chunk in actor.policy.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.bfloat16().float())


@fault("AReaL#1468", "a run goes on with the second moments of another layer", "rank", resumes=True)
def moments_swapped(actor: Any) -> list[Any]:
    def swap(actor: Any) -> None:
        from openrlhf_ext.megatron.checkpoint import optimizer_ranges

        by_size: dict[int, list[torch.Tensor]] = {}
        for held in optimizer_ranges(actor.policy.optimizer).values():
            by_size.setdefault(held.end - held.start, []).append(held.tensors["exp_avg_sq"])
        for same in by_size.values():
            values = [each.clone() for each in same]
            for tensor, other in zip(same, [*values[1:], values[0]], strict=True):
                tensor.copy_(other)

    return [after_loading(actor, swap)]


@fault("OpenRLHF#1103", "the data begin anew when a run goes on", "driver", resumes=True)
def data_begin_anew(loop: Any) -> list[Any]:
    def load(original: Any, self: Any, state: Any) -> None:
        self._episode, self.drawn = state["episode"], state["drawn"]

    return [wrapped_method(type(loop.rollouts.prompts), "load_state_dict", load)]


# ---- adapters


def adapter_otherwise(engine: Any, change: Callable[[dict, dict], dict]) -> Any:
    return [loads_otherwise(engine, change)]


@fault(
    "unsloth#8701",
    "rollouts come from the base: the adapter is never attached",
    "engine",
    lab="lora",
)
def no_adapter(engine: Any) -> list[Any]:
    return adapter_otherwise(
        engine, lambda sent, _: {name: torch.zeros_like(t) for name, t in sent.items()}
    )


@fault("ms-swift#9855", "rollouts come from the adapter before", "engine", lab="lora")
def old_adapter(engine: Any) -> list[Any]:
    return adapter_otherwise(engine, lambda sent, before: before)


@fault("unsloth-zoo#941", "an adapter is scaled once more at every update", "engine", lab="lora")
def adapter_scaled_again(engine: Any) -> list[Any]:
    return adapter_otherwise(
        engine,
        lambda sent, _: {
            name: tensor * 2 if "lora_B" in name else tensor for name, tensor in sent.items()
        },
    )
