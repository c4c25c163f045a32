"""Rules between options, and what has no effect beside the others: batches, lengths, layouts, names, warnings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config import RunConfig, option_table, rules
from openrlhf_ext.options import nest

sizes = st.integers(1, 12)


def made(options: dict[str, Any]) -> RunConfig:
    """A configuration of these options that nobody has checked."""
    return RunConfig.model_validate(nest(options))


@given(nodes=sizes, per_node=sizes, tp=sizes, pp=sizes, cp=sizes)
def test_the_ranks_are_whole_copies_of_the_policy(nodes, per_node, tp, pp, cp):
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp}
    config = made({"actor.num_nodes": nodes, "actor.num_gpus_per_node": per_node, "megatron": layout})
    found = list(rules.policy_layout(config))
    assert bool(found) == ((nodes * per_node) % (tp * pp * cp) != 0)
    for violation in found:
        assert f"got {nodes * per_node} ranks, {tp} * {pp} * {cp} = {tp * pp * cp}" in violation.message
    critic = {"num_nodes": nodes, "num_gpus_per_node": per_node, "megatron": layout}
    config = made({"algo.advantage.estimator": "gae", "critic": critic})
    assert bool(list(rules.critic_layout(config))) == bool(found)


def test_interleaving_needs_pipeline_stages(problems):
    assert any("needs megatron.pipeline_parallel_size > 1: got 2 and 1" in message for message in
               problems("--megatron.virtual_pipeline_size", "2"))  # fmt: skip


def test_recomputation_is_told_only_what_it_uses(problems, load):
    full = ("--megatron.recompute", "full")
    assert problems(*full, "--megatron.recompute_method", "block", "--megatron.recompute_num_layers", "3") == []
    assert problems(*full, "--megatron.recompute_num_layers", "2") == []
    (message,) = problems(*full, "--megatron.recompute_num_layers", "3")
    assert "got 3, a chunk of the model of actor.model_name_or_path has 4; use 1, 2, 4" in message
    assert problems("--megatron.recompute", "selective", "--megatron.recompute_modules", "core_attn", "mlp") == []
    (warning,) = load(*full, "--megatron.recompute_modules", "mlp").warnings
    assert warning == (
        "megatron.recompute_modules has no effect: got mlp, and megatron.recompute is full, not selective; leave it out"
    )
    (warning,) = load("--megatron.recompute_num_layers", "2").warnings
    assert "megatron.recompute_num_layers has no effect: got 2, and megatron.recompute is none, not full" in warning
    (message,) = problems("--megatron.recompute_modules", "attention")
    assert "core_attn" in message and "mlp" in message


def test_micro_batches_hold_the_longest_sequence(problems, load):
    dynamic = ("--train.dynamic_batch_enable", "--data.max_len", "256")
    assert problems(*dynamic) == []
    assert problems(*dynamic, "--train.max_tokens_per_gpu", "256", "--rollout.max_tokens_per_gpu", "256") == []
    (message,) = problems(*dynamic, "--train.max_tokens_per_gpu", "255")
    assert "got 255 * 1 < 256 tokens; use 256 or more" in message
    (message,) = problems(*dynamic, "--rollout.max_tokens_per_gpu", "100")
    assert message.startswith("rollout.max_tokens_per_gpu")
    (message,) = problems(*dynamic, "--megatron.context_parallel_size", "2", "--train.max_tokens_per_gpu", "127")
    assert "got 127 * 2 < 256 tokens; use 128 or more" in message
    for option in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        (warning,) = load(f"--{option}", "4096").warnings
        assert warning.startswith(f"{option} has no effect: got 4096, and train.dynamic_batch_enable is off")


def test_head_kernels_are_for_heads_that_have_some(load):
    assert load("--megatron.head_kernels", "torch", "--megatron.head", "two_pass").warnings == ()
    (warning,) = load("--megatron.head_kernels", "torch", "--megatron.head", "naive").warnings
    assert warning.startswith("megatron.head_kernels has no effect: got torch, and megatron.head is naive")


def test_sequence_parallelism_needs_tensor_parallelism(problems):
    (message,) = problems("--megatron.sequence_parallel_enable")
    assert "megatron.tensor_parallel_size > 1" in message
    assert problems("--megatron.sequence_parallel_enable", "--megatron.tensor_parallel_size", "2") == []


def test_sequences_fit_the_model(problems):
    assert problems("--data.max_len", "1024") == []
    (message,) = problems("--data.max_len", "1025")
    assert "max_position_embeddings" in message and "1025 > 1024" in message


@given(prompts=sizes, n=sizes, train=st.integers(1, 60))
def test_batches_divide(prompts, n, train):
    broken = [train % n != 0, prompts * n % train != 0]
    numbers = {"rollout.batch_size": prompts, "rollout.n_samples_per_prompt": n, "train.batch_size": train}
    found = list(rules.batches(made(numbers)))
    assert len(found) == sum(broken)
    assert (train % n == 0) or "groups are never split" in found[0].message


def test_any_number_of_sequences_is_dealt_to_any_number_of_ranks(problems):
    assert problems("--train.micro_batch_size", "5", "--rollout.micro_batch_size", "7") == []


def test_one_call_of_the_engines_per_batch(problems):
    assert problems("--rollout.vllm_generate_batch_size", "8") == []
    (message,) = problems("--rollout.vllm_generate_batch_size", "16")
    assert "rollout.vllm_generate_batch_size must equal rollout.batch_size: got 16 and 8" in message


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


def test_the_overlong_buffer_fits_into_the_response(problems, load):
    assert problems("--reward.overlong_buffer_len", "64") == []
    assert "must not exceed rollout.max_new_tokens: got 65 and 64" in problems("--reward.overlong_buffer_len", "65")[0]
    assert "whole number" in problems("--reward.overlong_buffer_len", "1.5")[0]
    null = problems("--reward.overlong_buffer_len", "8", "--rollout.max_new_tokens", "null")
    assert "got 8 and null" in null[0]
    (warning,) = load("--reward.overlong_penalty_factor", "2").warnings
    assert "reward.overlong_penalty_factor has no effect: got 2, and reward.overlong_buffer_len is not set" in warning


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


def test_a_printed_rule_names_the_options_it_is_filed_under():
    """Every option of a violation is real, and the message names at least one."""
    wrong = made({
        "actor": {"num_gpus_per_node": 3, "eps_clip": 0.1, "eps_clip_low_high": (0.1, 0.2), "num_nodes": 2,
                  "gradient_checkpointing_enable": True},
        "megatron": {"tensor_parallel_size": 4, "virtual_pipeline_size": 2, "recompute": "none"},
        "critic": {"num_gpus_per_node": 9, "num_nodes": 3, "megatron": {"sequence_parallel_enable": True,
                   "tensor_parallel_size": 1}},
        "algo": {"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.1, "target": 1, "horizon": 1},
                 "gae": {"kl_coef": 0.2, "name": "x"}, "dynamic_filtering_enable": True,
                 "dynamic_filtering_range": (1, 0)},
        "ref": {"num_nodes": 5, "offload": True},
        "rollout": {"batch_size": 3, "n_samples_per_prompt": 5, "vllm_generate_batch_size": 1, "max_new_tokens": 9000},
        "train": {"batch_size": 7, "dynamic_batch_enable": True, "max_tokens_per_gpu": 1, "max_staleness": 1,
                  "async_enable": True, "async_queue_size": 3},
        "weight_sync.probe_length": 9000,
        "reward.overlong_buffer_len": 9500.5,
        "vllm": {"sync_backend": "cuda_ipc", "max_requests": 1, "enable_sleep": True, "max_num_seqs": 9,
                 "max_num_batched_tokens": 8},
        "ckpt": {"best_metric_key": "x", "save_steps": 1, "disable_ds": True},
        "data": {"prompt_dataset": "a,b", "prompt_probs": "1", "input_template": "no"},
    })  # fmt: skip
    found = [violation for violation in rules.check_config(wrong).violations if "required" not in violation.message]
    assert len(found) > 28
    methods = {"algo.gae.kl_coef", "algo.gae.name"}
    for violation in found:
        assert set(violation.options) <= set(option_table()) | methods, violation
        assert any(name in violation.message for name in violation.options), violation


def test_warnings(load):
    assert load().warnings == ()
    (warning,) = load("--rollout.top_p", "0.9").warnings
    assert "top_p" in warning and "on-policy" in warning
    (warning,) = load("--algo.dapo.clip_high", "0.3").warnings
    assert warning == ("algo.dapo.* has no effect: got clip_high, and algo.advantage.estimator is grpo; leave it out")
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
        (("--eval.steps", "5"), "eval.dataset is not set", ("--eval.dataset", "train.jsonl")),
        (("--train.partial_rollout_enable",), "train.async_enable is off", ("--train.async_enable",)),
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
    assert warmup.startswith("critic.lr_warmup_ratio has no effect: got 0.1, and critic.lr_scheduler constant has no")
    assert floor.startswith("critic.min_lr_ratio has no effect: got 0.5, and critic.lr_scheduler is constant")
