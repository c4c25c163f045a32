from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config import guide_rules, rules
from openrlhf_ext.config.inputs import ModelFacts
from openrlhf_ext.config.options import option_table

sizes = st.integers(1, 12)


def model(**changes: int) -> ModelFacts:
    facts = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 512, "vocab_size": 101}
    return ModelFacts(model_type="qwen2", max_positions=1024, has_weights=True, **(facts | changes))


def batch(**changes: int | None):
    numbers = {
        "prompts": 8, "samples_per_prompt": 4, "generate_prompts": None, "train_samples": 32,
    }  # fmt: skip
    return list(rules.batch_violations(**(numbers | changes)))


@given(nodes=sizes, per_node=sizes, tp=sizes, pp=sizes)
def test_the_ranks_are_whole_copies_of_the_policy(nodes, per_node, tp, pp):
    found = list(rules.layout_violations(num_nodes=nodes, gpus_per_node=per_node, tp=tp, pp=pp, cp=1, vp=1,
                                         sequence_parallel=False))  # fmt: skip
    assert bool(found) == ((nodes * per_node) % (tp * pp) != 0)
    for violation in found:
        assert f"{nodes} * {per_node} = {nodes * per_node}" in violation.message
        assert f"{tp} * {pp} * 1 = {tp * pp}" in violation.message


def test_interleaving_needs_pipeline_stages_and_layers_for_every_chunk(problems):
    assert any("needs megatron.pipeline_parallel_size > 1: got 2 and 1" in message for message in
               problems("--megatron.virtual_pipeline_size", "2"))  # fmt: skip

    def found(layers: int, pp: int, vp: int) -> list[str]:
        facts = model(num_layers=layers)
        rule = rules.model_violations(model=facts, tp=1, pp=pp, vp=vp, engine_tp=1, max_len=64)
        return [violation.message for violation in rule]

    assert found(8, 2, 2) == found(8, 2, 4) == []
    (message,) = found(8, 2, 3)
    assert "got 2 * 3" in message and "use a megatron.virtual_pipeline_size of 1, 2, 4" in message


def test_recomputation_is_told_only_what_it_uses(problems):
    full = ("--megatron.recompute", "full")
    assert problems(*full, "--megatron.recompute_method", "block", "--megatron.recompute_num_layers", "3") == []
    assert problems(*full, "--megatron.recompute_num_layers", "2") == []
    (message,) = problems(*full, "--megatron.recompute_num_layers", "3")
    assert "got 3, a chunk of the model of actor.model_name_or_path has 4; use 1, 2, 4" in message
    assert problems("--megatron.recompute", "selective", "--megatron.recompute_modules", "core_attn", "mlp") == []
    (message,) = problems(*full, "--megatron.recompute_modules", "mlp")
    assert "have no effect without megatron.recompute selective" in message
    (message,) = problems("--megatron.recompute_num_layers", "2")
    assert "megatron.recompute_num_layers have no effect without megatron.recompute full: got uniform, 2" in message
    (message,) = problems("--megatron.recompute_modules", "attention")
    assert "core_attn" in message and "mlp" in message


def test_micro_batches_hold_the_longest_sequence(problems):
    dynamic = ("--train.dynamic_batch_enable", "--data.max_len", "256")
    assert problems(*dynamic) == []
    assert problems(*dynamic, "--train.max_tokens_per_gpu", "256", "--rollout.max_tokens_per_gpu", "256") == []
    (message,) = problems(*dynamic, "--train.max_tokens_per_gpu", "255")
    assert "got 255 * 1 < 256 tokens; use 256 or more" in message
    (message,) = problems(*dynamic, "--rollout.max_tokens_per_gpu", "100")
    assert message.startswith("rollout.max_tokens_per_gpu")
    (message,) = problems("--train.max_tokens_per_gpu", "4096")
    assert "has no effect without train.dynamic_batch_enable" in message


def test_head_kernels_are_for_heads_that_have_some(problems):
    assert problems("--megatron.head_kernels", "torch", "--megatron.head", "two_pass") == []
    (message,) = problems("--megatron.head_kernels", "torch", "--megatron.head", "naive")
    assert message.startswith("megatron.head_kernels has no effect with megatron.head naive")


def test_context_parallel_ranks_share_a_micro_batch():
    rule = {"enabled": True, "rollout_tokens": None, "max_len": 1000}
    assert list(rules.packing_violations(train_tokens=500, cp=2, **rule)) == []
    (violation,) = rules.packing_violations(train_tokens=499, cp=2, **rule)
    assert "use 500 or more" in violation.message


def test_sequence_parallelism_needs_tensor_parallelism(problems):
    (message,) = problems("--megatron.sequence_parallel_enable")
    assert "megatron.tensor_parallel_size > 1" in message
    assert problems("--megatron.sequence_parallel_enable", "--megatron.tensor_parallel_size", "2") == []


@given(heads=sizes, groups=sizes, layers=sizes, tp=sizes, pp=sizes)
def test_the_model_can_be_cut(heads, groups, layers, tp, pp):
    facts = model(num_heads=heads, num_kv_heads=groups, num_layers=layers, ffn_hidden_size=tp)
    found = list(rules.model_violations(model=facts, tp=tp, pp=pp, engine_tp=1, max_len=64))
    assert len(found) == (heads % tp != 0) + (groups % tp != 0 and tp % groups != 0) + (layers % pp != 0)


def test_an_engine_may_replicate_key_value_heads_but_not_split_them_unevenly():
    def found(engine_tp: int, kv_heads: int) -> int:
        facts = model(num_heads=24, num_kv_heads=kv_heads)
        return len(list(rules.model_violations(model=facts, tp=1, pp=1, engine_tp=engine_tp, max_len=64)))

    assert (found(4, 8), found(8, 4), found(6, 4), found(5, 5)) == (0, 0, 1, 1)


def test_sequences_fit_the_model(problems):
    assert problems("--data.max_len", "1024") == []
    (message,) = problems("--data.max_len", "1025")
    assert "max_position_embeddings" in message and "1025 > 1024" in message


@given(prompts=sizes, n=sizes, train=st.integers(1, 60))
def test_batches_divide(prompts, n, train):
    broken = [train % n != 0, prompts * n % train != 0]
    assert len(batch(prompts=prompts, samples_per_prompt=n, train_samples=train)) == sum(broken)


def test_any_number_of_sequences_is_dealt_to_any_number_of_ranks(problems):
    assert problems("--train.micro_batch_size", "5", "--rollout.micro_batch_size", "7") == []


def test_groups_are_never_split():
    violation = batch(train_samples=16, samples_per_prompt=32, prompts=1)[0]
    assert "train.batch_size" in violation.message and "groups are never split" in violation.message


def test_one_call_of_the_engines_per_batch():
    assert batch(generate_prompts=8) == []
    (violation,) = batch(generate_prompts=16)
    assert "rollout.vllm_generate_batch_size must equal rollout.batch_size" in violation.message


def test_data_parallel_ranks_are_not_judged_while_the_layout_is_broken(problems):
    (message,) = problems("--actor.num_gpus_per_node", "5", "--megatron.tensor_parallel_size", "2")
    assert "use 4 or 6 ranks" in message


def test_a_step_of_an_engine_has_a_token_of_every_sequence(problems):
    assert problems("--vllm.max_num_seqs", "64") == problems("--vllm.max_num_batched_tokens", "64") == []
    assert problems("--vllm.max_num_seqs", "64", "--vllm.max_num_batched_tokens", "64") == []
    (message,) = problems("--vllm.max_num_seqs", "65", "--vllm.max_num_batched_tokens", "64")
    assert "vllm.max_num_batched_tokens must be at least vllm.max_num_seqs: got 64 and 65" in message


def test_every_estimator_needs_groups(problems):
    (message,) = problems("--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8")
    assert "rollout.n_samples_per_prompt must be at least 2 for algo.advantage.estimator grpo" in message


def test_lengths(problems):
    assert problems("--rollout.max_new_tokens", "255") == []
    assert "the prompt needs room" in problems("--rollout.max_new_tokens", "256")[0]
    assert "weight_sync.probe_length" in problems("--weight_sync.probe_length", "300")[0]


def test_the_overlong_buffer_fits_into_the_response(problems):
    assert problems("--reward.overlong_buffer_len", "64") == []
    assert "must not exceed rollout.max_new_tokens: got 65 and 64" in problems("--reward.overlong_buffer_len", "65")[0]
    assert "whole number" in problems("--reward.overlong_buffer_len", "1.5")[0]
    null = problems("--reward.overlong_buffer_len", "8", "--rollout.max_new_tokens", "null")
    assert "got 8 and null" in null[0]
    assert "has no effect without" in problems("--reward.overlong_penalty_factor", "2")[0]


def test_importance_correction_is_one_that_exists(problems):
    prefix = "--algo.advantage.is_correction_"
    assert problems(f"{prefix}level", "seq") == []
    assert problems(f"{prefix}level", "token", f"{prefix}mode", "clip") == []
    assert "needs algo.advantage.is_correction_level token" in problems(
        f"{prefix}level", "seq", f"{prefix}mode", "clip")[0]  # fmt: skip
    assert "upper bound only" in problems(f"{prefix}level", "token", f"{prefix}gating", "tv")[0]
    assert problems(f"{prefix}level", "token", f"{prefix}gating", "tv", f"{prefix}threshold", "0.1") == []
    assert "0 <= LOW < HIGH" in problems(f"{prefix}threshold", "5", "2")[0]
    assert problems(f"{prefix}threshold", "1", "2", "3") != []


def test_the_weight_transport_fits_where_the_engines_are(problems):
    assert problems("--vllm.sync_backend", "gloo") == []
    assert problems("--vllm.sync_backend", "nccl") == []
    assert "train.colocate_all" in problems("--vllm.sync_backend", "cuda_ipc")[0]


def test_the_filter_range_is_not_empty(problems):
    assert problems("--algo.dynamic_filtering_enable") == []
    (message,) = problems("--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "1", "0")
    assert "LOW < HIGH" in message


def test_one_share_per_dataset(problems):
    assert problems("--data.prompt_dataset", "train.jsonl,train.jsonl", "--data.prompt_probs", "0.25,0.75") == []
    for shares in ("0.5", "0.5,0.6", "2,-1", "a,b", "0.5,nan", "inf,-inf"):
        (message,) = problems("--data.prompt_dataset", "train.jsonl,train.jsonl", "--data.prompt_probs", shares)
        assert message.startswith("data.prompt_probs must")


def test_an_option_with_two_names_is_not_set_to_two_values(problems):
    dapo = ["--algo.advantage.estimator", "dapo", "--actor.eps_clip_low_high", "0.2", "0.3"]
    assert problems(*dapo, "--algo.dapo.clip_high", "0.3") == []
    (message,) = problems(*dapo, "--algo.dapo.clip_high", "0.28")
    assert "actor.eps_clip_low_high and algo.dapo.clip_high" in message and "0.3 and 0.28" in message
    assert problems(*dapo, "--algo.grpo.clip_high", "0.28") == []  # another estimator's option
    (message,) = problems(*dapo, "--actor.eps_clip", "0.2")
    assert "actor.eps_clip and actor.eps_clip_low_high disagree" in message


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [("kl.coef", "0.2", "algo.kl"), ("kl", "3", "algo.kl"), ("correction.level", "token", "is_correction"),
     ("name", "x", "algo.advantage.estimator")],
)  # fmt: skip
def test_the_map_of_an_estimator_holds_its_options_only(problems, key, value, instead):
    (message,) = problems(f"--algo.grpo.{key}", value)
    assert message.startswith(f"algo.grpo.{key.split('.')[0]} is not an option of an estimator") and instead in message


def test_a_penalty_is_set_once(problems):
    (message,) = problems("--algo.kl.init_coef", "0.1", "--algo.grpo.kl_coef", "0.2")
    assert "both set a KL penalty: got 0.1 and 0.2" in message
    assert problems("--algo.kl.init_coef", "0.1", "--algo.grpo.kl_coef", "0") == []


def test_the_initial_entropy_is_measured_over_a_number_of_prompts(problems):
    words = ["--algo.advantage.estimator", "gtpo_conflict", "--algo.gtpo_conflict.initial_entropy_prompts"]
    assert problems(*words, "8") == []
    for value in ("-1", "true", "many"):
        (message,) = problems(*words, value)
        assert "must be a number of prompts, 0 or more" in message


def test_violations_name_options_that_exist():
    """Every option a violation is filed under is real; the messages name at least the first one."""
    found = [
        *rules.layout_violations(num_nodes=1, gpus_per_node=3, tp=2, pp=1, cp=2, vp=2, sequence_parallel=False),
        *rules.layout_violations(num_nodes=1, gpus_per_node=1, tp=1, pp=1, cp=1, vp=1, sequence_parallel=True),
        *rules.model_violations(model=model(), tp=3, pp=3, engine_tp=3, max_len=4096),
        *batch(prompts=3, samples_per_prompt=5, train_samples=7, generate_prompts=1),
        *rules.packing_violations(enabled=False, train_tokens=1, rollout_tokens=None, cp=1, max_len=2),
        *rules.packing_violations(enabled=True, train_tokens=None, rollout_tokens=1, cp=1, max_len=2),
        *rules.group_violations(estimator="grpo", samples_per_prompt=1),
        *guide_rules.zero_batch_violations(zero_batch=True, has_guide=False),
        *guide_rules.sampling_violations(samples=4, group=4, colocate_all=True),
        *guide_rules.rank_violations(own_ranks=3, copy=2),
        *rules.length_violations(max_new_tokens=9, max_len=8, overlong_buffer=10.5, overlong_factor=1, probe_length=9),
        *rules.length_violations(max_new_tokens=4, max_len=8, overlong_buffer=None, overlong_factor=2, probe_length=2),
        *rules.correction_violations(level="seq", mode="clip", gating="tv", threshold=(2.0, 1.0)),
        *rules.filtering_violations(enabled=True, low=1, high=0),
        *rules.mixture_violations(datasets="a,b", shares="1"),
    ]
    assert len(found) > 20
    for violation in found:
        assert set(violation.options) <= set(option_table())
        assert any(name in violation.message for name in violation.options)


def test_warnings(load):
    assert load().warnings == ()
    (warning,) = load("--rollout.top_p", "0.9").warnings
    assert "top_p" in warning and "on-policy" in warning
    (warning,) = load("--algo.dapo.clip_high", "0.3").warnings
    assert warning == "algo.dapo.* has no effect: algo.advantage.estimator is grpo"
    (warning,) = load("--algo.advantage.is_correction_mode", "clip").warnings
    assert "is_correction_level is off" in warning
    (warning,) = load("--algo.dynamic_filtering_range", "0.1", "0.9").warnings
    assert "algo.dynamic_filtering_enable is off" in warning


@pytest.mark.parametrize(
    ("words", "reason", "effective"),
    [
        (("--actor.lr_scheduler", "constant", "--actor.lr_warmup_ratio", "0.1"), "constant has no warm-up",
         ("--actor.lr_scheduler", "constant_with_warmup")),
        (("--actor.lr_scheduler", "linear", "--actor.min_lr_ratio", "0.5"), "actor.lr_scheduler is linear",
         ("--actor.lr_scheduler", "cosine_with_min_lr")),
        (("--train.micro_batch_size", "2", "--train.dynamic_batch_enable"), "up to a token budget",
         ("--train.dynamic_batch_enable", "false")),
        (("--rollout.micro_batch_size", "2", "--train.dynamic_batch_enable"), "up to a token budget",
         ("--train.dynamic_batch_enable", "false")),
        (("--eval.temperature", "1"), "eval.dataset is not set", ("--eval.dataset", "train.jsonl")),
        (("--rollout.max_filter_batches", "3"), "algo.dynamic_filtering_enable is off",
         ("--algo.dynamic_filtering_enable",)),
        (("--ckpt.save_hf",), "neither ckpt.save_steps nor ckpt.best_metric_key is set", ("--ckpt.save_steps", "1")),
        (("--ckpt.max_num", "9"), "neither ckpt.save_steps nor ckpt.best_metric_key is set",
         ("--ckpt.save_steps", "1")),
    ],
)  # fmt: skip
def test_options_without_effect_beside_others_are_named(load, words, reason, effective):
    (warning,) = load(*words).warnings
    assert " has no effect: " in warning and reason in warning
    assert any(warning.startswith(word.removeprefix("--") + " ") for word in words)
    assert load(*words, *effective).warnings == ()


def test_the_critics_schedule_is_looked_at_too(load):
    gae = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")
    words = ("--critic.lr_scheduler", "constant", "--critic.lr_warmup_ratio", "0.1", "--critic.min_lr_ratio", "0.5")
    warmup, floor = load(*gae, *words).warnings
    assert warmup == "critic.lr_warmup_ratio has no effect: critic.lr_scheduler constant has no warm-up"
    assert floor == "critic.min_lr_ratio has no effect: critic.lr_scheduler is constant"
