"""Rules between options, and what has no effect beside the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config import RunConfig, format_config, option_table, placement_table, rules
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.options import nest, value_of
from tests.config.conftest import MODEL

sizes = st.integers(1, 12)


def made(options: dict[str, Any]) -> RunConfig:
    """A configuration of these options that nobody has checked."""
    return RunConfig.model_validate(nest(options))


def test_every_data_parallel_rank_has_a_sample_of_an_update(problems):
    (message,) = problems("--actor.num_nodes", "9", "--actor.num_gpus_per_node", "8")
    assert message.startswith(
        "the policy has 72 data-parallel ranks, but an update has only 32 samples "
        "(train.batch_size)"
    )
    assert problems("--actor.num_nodes", "4", "--actor.num_gpus_per_node", "8") == []


@given(nodes=sizes, per_node=sizes, tp=sizes, pp=sizes, cp=sizes)
def test_the_ranks_are_whole_copies_of_the_policy(nodes, per_node, tp, pp, cp):
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp}
    config = made(
        {"actor.num_nodes": nodes, "actor.num_gpus_per_node": per_node, "megatron": layout}
    )
    found = list(rules.trained_layout(config))
    assert bool(found) == ((nodes * per_node) % (tp * pp * cp) != 0)
    for violation in found:
        assert (
            f"got {nodes * per_node} ranks, {tp} * {pp} * {cp} = {tp * pp * cp}"
            in violation.message
        )
    critic = {"num_nodes": nodes, "num_gpus_per_node": per_node, "megatron": layout}
    config = made({"algo.advantage.estimator": "gae", "critic": critic})
    assert bool(list(rules.critic_layout(config))) == bool(found)


def test_micro_batches_of_log_probs_are_idle_where_nobody_computes_any(load):
    size = ("--rollout.micro_batch_size", "7")
    (warning,) = load(*size).warnings
    assert warning == (
        "rollout.micro_batch_size has no effect: got 7, and there is no forward pass before the "
        "update (algo.old_logprobs); leave it out"
    )
    loss = ("--algo.kl.init_coef", "0.1", "--algo.kl.use_loss", "--algo.kl.estimator", "k2")
    for scored in (("--algo.old_logprobs", "policy"), loss, ("--train.max_epochs", "2")):
        assert load(*size, *scored).warnings == ()


def test_adams_states_in_host_memory_are_those_of_the_distributed_optimizer(problems, load):
    offload = ("--ds.adam_offload", "true")
    (message,) = problems(*offload, "--megatron.distributed_optimizer_enable", "false")
    assert message == (
        "ds.adam_offload needs megatron.distributed_optimizer_enable, which is the default: got "
        "false; leave one of them out"
    )
    adapted = load(*offload, "--ds.lora.rank", "4")
    assert not adapted.ds.optimizer_on_host and load(*offload).ds.optimizer_on_host
    assert any(
        line.startswith("ds.adam_offload has no effect with ds.lora.*") for line in adapted.warnings
    )


def test_interleaving_needs_pipeline_stages(problems):
    assert any(
        "needs megatron.pipeline_parallel_size > 1: got 2 and 1" in message
        for message in problems("--megatron.virtual_pipeline_size", "2")
    )


def test_recomputation_is_told_only_what_it_uses(problems, load):
    full = ("--megatron.recompute", "full")
    assert (
        problems(
            *full, "--megatron.recompute_method", "block", "--megatron.recompute_num_layers", "3"
        )
        == []
    )
    assert problems(*full, "--megatron.recompute_num_layers", "2") == []
    (message,) = problems(*full, "--megatron.recompute_num_layers", "3")
    assert "got 3, a chunk of the model of actor.model_name_or_path has 4; use 1, 2, 4" in message
    assert (
        problems(
            "--megatron.recompute", "selective", "--megatron.recompute_modules", "core_attn", "mlp"
        )
        == []
    )
    (warning,) = load(*full, "--megatron.recompute_modules", "mlp").warnings
    assert warning == (
        "megatron.recompute_modules has no effect: got mlp, and megatron.recompute is full, not "
        "selective; leave it out"
    )
    (warning,) = load("--megatron.recompute_num_layers", "2").warnings
    assert (
        "megatron.recompute_num_layers has no effect: got 2, and megatron.recompute is none, "
        "not full" in warning
    )
    (message,) = problems("--megatron.recompute_modules", "attention")
    assert "core_attn" in message and "mlp" in message


def test_parameters_are_gathered_late_only_in_buckets_and_from_shards(problems, load):
    gather, reduce = ("--megatron.overlap_param_gather",), ("--megatron.overlap_grad_reduce",)
    assert problems(*gather, *reduce, "--megatron.ddp_bucket_size", "1000") == []
    assert problems(*reduce, "--megatron.distributed_optimizer_enable", "false") == []
    (message,) = problems(*gather)
    assert "got megatron.overlap_grad_reduce false; switch on what is missing" in message
    (message,) = problems(*gather, "--megatron.distributed_optimizer_enable", "false")
    assert (
        "megatron.overlap_grad_reduce false and megatron.distributed_optimizer_enable false"
        in message
    )
    (warning,) = load("--megatron.ddp_bucket_size", "1000").warnings
    assert (
        "megatron.ddp_bucket_size has no effect: got 1000, and megatron.overlap_grad_reduce is off"
        in warning
    )


def test_a_sequence_longer_than_the_budget_is_a_micro_batch_of_its_own(load):
    dynamic = ("--train.dynamic_batch_enable", "--data.max_len", "256")
    assert load(*dynamic).warnings == ()
    assert (
        load(
            *dynamic, "--train.max_tokens_per_gpu", "256", "--rollout.max_tokens_per_gpu", "256"
        ).warnings
        == ()
    )
    (line,) = load(*dynamic, "--train.max_tokens_per_gpu", "255").warnings
    assert (
        "below data.max_len (255 * 1 < 256 tokens): a longer sequence gets its own micro-batch"
        in line
    )
    (line,) = load(*dynamic, "--rollout.max_tokens_per_gpu", "100").warnings
    assert line.startswith("rollout.max_tokens_per_gpu")
    (line,) = load(
        *dynamic, "--megatron.context_parallel_size", "2", "--train.max_tokens_per_gpu", "127"
    ).warnings
    assert "(127 * 2 < 256 tokens)" in line
    for option in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        for tokens in ("4096", "16192"):
            (warning,) = load(f"--{option}", tokens).warnings
            assert warning.startswith(
                f"{option} has no effect: got {tokens}, and train.dynamic_batch_enable is off"
            )


def test_sequence_parallelism_needs_tensor_parallelism(problems):
    (message,) = problems("--megatron.sequence_parallel_enable")
    assert "megatron.tensor_parallel_size > 1" in message
    assert (
        problems("--megatron.sequence_parallel_enable", "--megatron.tensor_parallel_size", "2")
        == []
    )


def test_sequences_fit_the_model(problems):
    assert problems("--data.max_len", "1024") == []
    (message,) = problems("--data.max_len", "1025")
    assert "max_position_embeddings" in message and "1025 > 1024" in message


def test_a_stretched_window_bounds_sequences_and_its_factor_forbids_the_fused_rotary_embedding(
    problems, run_dir
):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    stretched = json.dumps(MODEL | {"max_position_embeddings": 128, "rope_parameters": yarn})
    (run_dir / "critic").mkdir()
    (run_dir / "critic/config.json").write_text(stretched)
    critic = [
        "--algo.advantage.estimator",
        "gae",
        "--critic.model_name_or_path",
        "critic",
        "--megatron.rope_fusion",
    ]
    (message,) = (found for found in problems(*critic) if "rope_fusion" in found)
    assert message == (
        "megatron.rope_fusion ignores the factor of cosines and sines, which is 1.13863 for the "
        "model of critic.model_name_or_path (rope_type yarn): leave megatron.rope_fusion out"
    )
    (run_dir / "model/config.json").write_text(stretched)
    assert problems("--data.max_len", "512") == []
    (message,) = problems("--data.max_len", "513")
    assert (
        "the model's max_position_embeddings and its rope_type yarn: got 513 > 512 tokens of "
        "the model of" in message
    )
    (message,) = problems("--megatron.rope_fusion")
    assert "for the model of actor.model_name_or_path (rope_type yarn)" in message


@pytest.mark.parametrize("window", [{"model_type": "mistral"}, {"use_sliding_window": True}])
def test_sequences_fit_an_attention_window(problems, run_dir, window):
    config = run_dir / "model/config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "sliding_window": 512, **window})
    )
    assert problems("--data.max_len", "512") == []
    (message,) = problems("--data.max_len", "513")
    assert (
        "attention window of the model of actor.model_name_or_path (sliding_window in its "
        "config.json)" in message
    )
    assert "got 513 > 512 tokens; set data.max_len to at most 512" in message


@given(prompts=sizes, n=sizes, train=st.integers(1, 60))
def test_batches_divide(prompts, n, train):
    broken = [train % n != 0, prompts * n % train != 0]
    numbers = {
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": n,
        "train.batch_size": train,
    }
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
    assert (
        problems("--vllm.max_num_seqs", "64")
        == problems("--vllm.max_num_batched_tokens", "64")
        == []
    )
    assert problems("--vllm.max_num_seqs", "64", "--vllm.max_num_batched_tokens", "64") == []
    (message,) = problems("--vllm.max_num_seqs", "65", "--vllm.max_num_batched_tokens", "64")
    assert (
        "vllm.max_num_batched_tokens must be at least vllm.max_num_seqs: got 64 and 65" in message
    )


def test_graphs_are_captured_for_some_requests_or_switched_off(problems):
    assert (
        problems("--vllm.max_cudagraph_capture_size", "1024")
        == problems("--vllm.enforce_eager")
        == []
    )
    (message,) = problems("--vllm.max_cudagraph_capture_size", "1024", "--vllm.enforce_eager")
    assert (
        "vllm.max_cudagraph_capture_size is 1024, but vllm.enforce_eager switches CUDA graphs off"
        in message
    )


def test_every_estimator_needs_groups(problems):
    (message,) = problems("--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8")
    assert (
        "rollout.n_samples_per_prompt must be at least 2 for algo.advantage.estimator grpo"
        in message
    )


def test_lengths(problems):
    assert problems("--rollout.max_new_tokens", "255") == []
    assert "the prompt needs room" in problems("--rollout.max_new_tokens", "256")[0]
    assert "weight_sync.probe_length" in problems("--weight_sync.probe_length", "300")[0]


def test_the_overlong_buffer_fits_into_the_response(problems, load):
    assert problems("--reward.overlong_buffer_len", "64") == []
    assert (
        "must not exceed rollout.max_new_tokens: got 65 and 64"
        in problems("--reward.overlong_buffer_len", "65")[0]
    )
    assert "whole number" in problems("--reward.overlong_buffer_len", "1.5")[0]
    null = problems("--reward.overlong_buffer_len", "8", "--rollout.max_new_tokens", "null")
    assert "got 8 and null" in null[0]
    (warning,) = load("--reward.overlong_penalty_factor", "2").warnings
    assert (
        "reward.overlong_penalty_factor has no effect: got 2, and reward.overlong_buffer_len is "
        "not set" in warning
    )


def test_the_weight_transport_fits_where_the_engines_are(problems, load):
    assert problems("--vllm.sync_backend", "gloo") == []
    assert problems("--vllm.sync_backend", "nccl") == []
    shared = load("--vllm.sync_backend", "nccl", *COLOCATED, *TWO_ENGINES)
    assert shared.vllm.sync_backend == "auto" and "is read as auto: CUDA IPC" in shared.warnings[0]
    (both,) = problems("--vllm.sync_backend", "nccl", "--train.full_determinism_enable")
    assert "one channel and one thread" in both and "use auto or gloo" in both
    assert problems("--train.full_determinism_enable") == []
    assert "engines on other GPUs" in problems("--vllm.sync_backend", "cuda_ipc")[0]


def test_the_filter_range_is_not_empty(problems):
    assert problems("--algo.dynamic_filtering_enable") == []
    (message,) = problems(
        "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "1", "0"
    )
    assert "LOW < HIGH" in message


def test_one_share_per_dataset(problems):
    assert (
        problems(
            "--data.prompt_dataset", "train.jsonl,train.jsonl", "--data.prompt_probs", "0.25,0.75"
        )
        == []
    )
    for shares in ("0.5", "0.5,0.6", "2,-1", "a,b", "0.5,nan", "inf,-inf"):
        (message,) = problems(
            "--data.prompt_dataset", "train.jsonl,train.jsonl", "--data.prompt_probs", shares
        )
        assert message.startswith("data.prompt_probs must")


def test_an_option_with_two_names_is_not_set_to_two_values(problems):
    dapo = ["--algo.advantage.estimator", "dapo", "--actor.eps_clip_low_high", "0.2", "0.3"]
    assert problems(*dapo, "--algo.dapo.clip_high", "0.3") == []
    (message,) = problems(*dapo, "--algo.dapo.clip_high", "0.28")
    assert (
        "actor.eps_clip_low_high and algo.dapo.clip_high" in message and "0.3 and 0.28" in message
    )
    assert problems(*dapo, "--algo.grpo.clip_high", "0.28") == []  # another estimator's option
    (message,) = problems(*dapo, "--actor.eps_clip", "0.2")
    assert "actor.eps_clip and actor.eps_clip_low_high disagree" in message


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("kl.coef", "0.2", "algo.kl"),
        ("kl", "3", "algo.kl"),
        ("correction.level", "token", "is_correction"),
        ("name", "x", "algo.advantage.estimator"),
    ],
)
def test_the_map_of_an_estimator_holds_its_options_only(problems, key, value, instead):
    (message,) = problems(f"--algo.grpo.{key}", value)
    assert (
        message.startswith(f"algo.grpo.{key.split('.')[0]} is not an option of an estimator")
        and instead in message
    )


def test_a_penalty_is_set_once(problems):
    (message,) = problems("--algo.kl.init_coef", "0.1", "--algo.grpo.kl_coef", "0.2")
    assert "both set a KL penalty: got 0.1 and 0.2" in message
    assert problems("--algo.kl.init_coef", "0.1", "--algo.grpo.kl_coef", "0") == []


def test_a_printed_rule_names_the_options_it_is_filed_under():
    """Every option of a violation is real, and the message names at least one."""
    wrong = made(
        {
            "actor": {
                "num_gpus_per_node": 3,
                "eps_clip": 0.1,
                "eps_clip_low_high": (0.1, 0.2),
                "num_nodes": 2,
                "gradient_checkpointing_enable": True,
            },
            "megatron": {
                "tensor_parallel_size": 4,
                "virtual_pipeline_size": 2,
                "recompute": "none",
            },
            "critic": {
                "num_gpus_per_node": 9,
                "num_nodes": 3,
                "megatron": {"sequence_parallel_enable": True, "tensor_parallel_size": 1},
            },
            "algo": {
                "advantage": {"estimator": "gae"},
                "kl": {"init_coef": 0.1, "target": 1, "horizon": 1},
                "gae": {"kl_coef": 0.2, "name": "x"},
                "dynamic_filtering_enable": True,
                "dynamic_filtering_range": (1, 0),
            },
            "ref": {"num_nodes": 5, "offload": True},
            "rollout": {
                "batch_size": 3,
                "n_samples_per_prompt": 5,
                "vllm_generate_batch_size": 1,
                "max_new_tokens": 9000,
            },
            "train": {
                "batch_size": 7,
                "dynamic_batch_enable": True,
                "max_tokens_per_gpu": 1,
                "max_staleness": 1,
                "async_enable": True,
                "async_queue_size": 3,
            },
            "weight_sync.probe_length": 9000,
            "reward.overlong_buffer_len": 9500.5,
            "vllm": {
                "sync_backend": "cuda_ipc",
                "max_requests": 1,
                "enable_sleep": True,
                "max_num_seqs": 9,
                "max_num_batched_tokens": 8,
            },
            "ckpt": {"best_metric_key": "x", "save_steps": 1, "disable_ds": True},
            "data": {"prompt_dataset": "a,b", "prompt_probs": "1", "input_template": "no"},
        }
    )
    found = [
        violation
        for violation in rules.check_config(wrong).violations
        if "required" not in violation.message
    ]
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
    assert warning == (
        "algo.dapo.* has no effect: got clip_high, and algo.advantage.estimator is grpo; leave "
        "it out"
    )
    (warning,) = load("--algo.advantage.is_correction_mode", "clip").warnings
    assert "is_correction_level is off" in warning
    (warning,) = load("--algo.dynamic_filtering_range", "0.1", "0.9").warnings
    assert "algo.dynamic_filtering_enable is off" in warning
    drafts = ("--vllm.speculative.method", "ngram", "--train.full_determinism_enable")
    assert any("vllm.speculative.method ngram" in each for each in load(*drafts).warnings)


@pytest.mark.parametrize(
    ("words", "reason", "effective"),
    [
        (
            ("--actor.lr_scheduler", "constant", "--actor.lr_warmup_ratio", "0.1"),
            "actor.lr_scheduler is constant",
            ("--actor.lr_scheduler", "constant_with_warmup"),
        ),
        (
            ("--actor.lr_scheduler", "constant", "--actor.lr_warmup_steps", "5"),
            "actor.lr_scheduler is constant",
            ("--actor.lr_scheduler", "constant_with_warmup", "--actor.min_lr_ratio", "0.1"),
        ),
        (
            ("--actor.lr_warmup_ratio", "0.1", "--actor.lr_warmup_steps", "5"),
            "actor.lr_warmup_steps is 5, not null",
            ("--actor.lr_warmup_steps", "null"),
        ),
        (
            ("--actor.lr_scheduler", "linear", "--actor.min_lr_ratio", "0.5"),
            "actor.lr_scheduler is linear",
            ("--actor.lr_scheduler", "cosine_with_min_lr"),
        ),
        (
            ("--train.micro_batch_size", "2", "--train.dynamic_batch_enable"),
            "train.dynamic_batch_enable is on",
            ("--train.dynamic_batch_enable", "false"),
        ),
        (
            (
                "--rollout.micro_batch_size",
                "2",
                "--train.dynamic_batch_enable",
                "--algo.old_logprobs",
                "policy",
            ),
            "train.dynamic_batch_enable is on",
            ("--train.dynamic_batch_enable", "false"),
        ),
        (("--eval.temperature", "1"), "eval.dataset is not set", ("--eval.dataset", "train.jsonl")),
        (("--eval.top_p", "0.7"), "eval.dataset is not set", ("--eval.dataset", "train.jsonl")),
        (("--eval.steps", "5"), "eval.dataset is not set", ("--eval.dataset", "train.jsonl")),
        (
            ("--train.partial_rollout_enable",),
            "train.async_enable is off",
            ("--train.async_enable",),
        ),
        (
            ("--rollout.max_filter_batches", "3"),
            "algo.dynamic_filtering_enable is off",
            ("--algo.dynamic_filtering_enable",),
        ),
        (
            ("--ckpt.save_hf",),
            "ckpt.save_steps is -1 and ckpt.best_metric_key is not set",
            ("--ckpt.save_steps", "1"),
        ),
        (
            ("--logger.wandb.project", "mine"),
            "logger.wandb.key is not set",
            ("--logger.wandb.key", "secret"),
        ),
        (
            ("--logger.logging_steps", "5"),
            "logger.wandb.key is not set and logger.tensorboard_dir is not set",
            ("--logger.tensorboard_dir", "board"),
        ),
        (
            ("--reward.remote_url", "http://127.0.0.1:9/x", "--reward.num_workers", "3"),
            "names servers",
            ("--reward.remote_url", "reward.py"),
        ),
        (
            ("--ds.value_head_prefix", "value"),
            "algo.advantage.estimator is grpo, not gae",
            ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2"),
        ),
        (
            ("--ckpt.max_num", "9"),
            "ckpt.save_steps is -1 and ckpt.best_metric_key is not set",
            ("--ckpt.save_steps", "1"),
        ),
    ],
)
def test_options_without_effect_beside_others_are_named(load, words, reason, effective):
    (warning,) = load(*words).warnings
    assert " has no effect: " in warning and reason in warning
    assert any(warning.startswith(word.removeprefix("--") + " ") for word in words)
    assert load(*words, *effective).warnings == ()


def test_the_critics_schedule_is_looked_at_too(load):
    gae = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")
    words = (
        "--critic.lr_scheduler",
        "constant",
        "--critic.lr_warmup_ratio",
        "0.1",
        "--critic.min_lr_ratio",
        "0.5",
    )
    warmup, floor = load(*gae, *words).warnings
    assert warmup.startswith(
        "critic.lr_warmup_ratio has no effect: got 0.1, and critic.lr_scheduler is constant"
    )
    assert floor.startswith(
        "critic.min_lr_ratio has no effect: got 0.5, and critic.lr_scheduler is constant"
    )


# ---- colocated and streaming training


COLOCATED = ("--train.colocate_all", "--ds.enable_sleep", "--vllm.enable_sleep")
TWO_ENGINES = ("--vllm.num_engines", "2")  # as many as the run of conftest.py has ranks


def test_a_colocated_run_has_as_many_engine_workers_as_policy_ranks(load, problems):
    assert load(*COLOCATED, *TWO_ENGINES).warnings == ()
    assert problems(*COLOCATED, "--vllm.tensor_parallel_size", "2") == []
    (message,) = problems(*COLOCATED)
    assert "got 2 and 1 * 1 = 1" in message and "change vllm.num_engines" in message


def test_engines_that_can_be_done_without_are_some_of_the_policys_own(load, problems):
    fewer = (*TWO_ENGINES, "--vllm.min_engines", "1")
    (warning,) = load(*fewer, "--vllm.max_restarts", "0", "--rollout.timeout_s", "200").warnings
    assert (
        "vllm.hang_timeout_s 300 is not below rollout.timeout_s 200" in warning
        and problems(*fewer) == []
    )
    assert problems(*TWO_ENGINES, "--vllm.min_engines", "2", *COLOCATED) == []
    (message,) = problems(*TWO_ENGINES, "--vllm.min_engines", "3")
    assert message.startswith("vllm.min_engines must not exceed vllm.num_engines: got 3 and 2")
    assert "vllm.min_engines" in problems(*TWO_ENGINES, "--vllm.min_engines", "0")[0]
    (message,) = problems(*fewer, *COLOCATED)
    assert message.startswith(
        "vllm.min_engines must be vllm.num_engines with train.colocate_all, because losing"
    )
    guide = (
        "--algo.advantage.estimator",
        "mixed_policy_dapo",
        "--guide.model_name_or_path",
        "model",
    )
    (message,) = problems(*fewer, *guide)
    assert "with guide.model_name_or_path, because every group needs all of the guide's" in message


def test_a_run_that_its_corridor_ends_is_not_started_again(problems):
    words = (
        "--train.corridor",
        "file",
        "--train.corridor_action",
        "fail",
        "--train.max_restarts",
        "2",
    )
    (message,) = problems(*words)
    assert message.startswith(
        "train.corridor_action fail ends a run that train.max_restarts 2 would start again"
    )
    assert problems(*words[:-2]) == problems(*words[:2], *words[-2:]) == []


def test_a_run_goes_back_to_checkpoints_that_it_writes(load, problems):
    rollback = ("--train.rollback_on", "nan", "spike")
    assert load(*rollback, "--ckpt.save_steps", "5").train.rollback_on == ("nan", "spike")
    for words in ((), ("--ckpt.save_steps", "5", "--ckpt.disable_ds", "--ckpt.save_hf")):
        (message,) = problems(*rollback, *words)
        assert message.startswith(
            "train.rollback_on needs checkpoints to resume from: set ckpt.save_steps"
        )
    (warning,) = load("--train.spike_factor", "3").warnings
    assert (
        warning.startswith("train.spike_factor has no effect: got 3")
        and "train.rollback_on is not set" in warning
    )


def test_a_colocated_run_whose_parts_do_not_sleep_is_warned_about(load):
    (warning,) = load("--train.colocate_all", "--vllm.enable_sleep", *TWO_ENGINES).warnings
    assert "vllm.gpu_memory_utilization must leave room" in warning


@pytest.mark.parametrize("option", ["ds.enable_sleep", "vllm.enable_sleep"])
def test_only_sharers_sleep(load, option):
    config = load(f"--{option}")
    assert value_of(config, option) is False
    assert (
        config.warnings[0].startswith(f"{option} has no effect")
        and "train.colocate_all" in config.warnings[0]
    )


def test_engines_of_an_asynchronous_run_have_gpus_of_their_own(load, problems):
    assert (
        problems(
            "--train.async_enable",
            "--train.partial_rollout_enable",
            "--train.async_queue_size",
            "2",
        )
        == []
    )
    for streams in (["--train.async_enable"], ["--train.max_staleness", "1"]):
        config = load(*streams, *COLOCATED, "--vllm.num_engines", "3", *GAE)
        assert config.warnings[0].startswith(
            "train.colocate_all with rollouts during training: the engines get their own GPUs"
        )
        assert [warning.split()[0] for warning in config.warnings[1:3]] == [
            "ds.enable_sleep",
            "vllm.enable_sleep",
        ]
        assert not config.engines_share_gpus and config.gpu_memory_utilization == 0.95
        shown = placement_table(config)
        assert "on GPUs of the policy" in shown and "on their own GPUs" in shown
    assert load(*COLOCATED, *TWO_ENGINES, "--train.max_staleness", "0").engines_share_gpus


def test_openrlhfs_names_come_to_a_number_of_versions_that_a_token_may_lag(load, problems):
    def streaming(*words: str):
        config = load(*words)
        return config.max_staleness, config.partial_rollouts

    assert streaming() == (0, True)
    assert streaming("--train.max_staleness", "2") == (2, True)
    assert streaming("--train.async_enable") == (1, False)
    assert streaming("--train.async_enable", "--train.async_queue_size", "3") == (3, False)
    assert streaming("--train.async_enable", "--train.partial_rollout_enable") == (1, True)
    assert streaming("--train.async_enable", "--train.max_staleness", "2") == (2, False)
    two_names = (
        "--train.async_enable",
        "--train.max_staleness",
        "2",
        "--train.async_queue_size",
        "3",
    )
    assert "two names for one number: got 2 and 3" in problems(*two_names)[0]
    assert (
        "train.max_staleness 0 forbids"
        in problems("--train.async_enable", "--train.max_staleness", "0")[0]
    )


def test_late_groups_are_corrected_or_dropped(load, problems):
    uncorrected = ("--train.max_staleness", "1", "--algo.advantage.is_correction_level", "off")
    (message,) = problems(*uncorrected)
    assert "train.late_groups train needs an importance correction" in message and "drop" in message
    for bounded in ("drop", "wait"):
        assert problems(*uncorrected, "--train.late_groups", bounded) == []
    (warning,) = load("--train.late_groups", "drop").warnings
    assert (
        "train.late_groups has no effect: got drop, and train.max_staleness is not set" in warning
    )


def test_an_engine_can_be_asked_for_a_whole_group(problems):
    (message,) = problems("--vllm.max_requests", "3", "--rollout.n_samples_per_prompt", "4")
    assert (
        "vllm.max_requests must be at least rollout.n_samples_per_prompt" in message
        and "got 3 and 4" in message
    )


def test_tensor_parallel_groups_fit_into_a_node(problems):
    two_nodes = (
        "--actor.num_nodes",
        "2",
        "--megatron.tensor_parallel_size",
        "2",
        "--actor.num_gpus_per_node",
    )
    assert problems(*two_nodes, "2") == []
    (message,) = problems(*two_nodes, "1")
    assert "every layer would wait for the network: got 2 and 1" in message


def test_asynchronous_runs_correct_their_samples_unless_told_not_to(load):
    def correction(*words: str):
        return algorithm_options(load(*words))[2]

    assert correction() is None
    assert correction("--train.async_enable") == {
        "level": "token",
        "mode": "mask",
        "gating": "ratio",
        "threshold": [0.5, 5.0],
    }
    assert correction("--train.async_enable", "--algo.advantage.is_correction_level", "off") is None
    assert (
        correction("--train.async_enable", "--algo.advantage.is_correction_level", "seq")["level"]
        == "seq"
    )
    assert (
        correction("--train.async_enable", "--algo.advantage.is_correction_mode", "clip")["mode"]
        == "clip"
    )


def test_options_without_effect_are_told(load):
    (warning,) = load("--train.async_queue_size", "2").warnings
    assert warning.startswith(
        "train.async_queue_size has no effect: got 2, and train.async_enable is off"
    )
    (warning,) = load(
        "--train.async_enable", "--train.partial_rollout_enable", "--train.full_determinism_enable"
    ).warnings
    assert "two runs differ" in warning


def test_an_engine_that_hangs_is_found_before_its_batch_is_given_up(load):
    shorter = ("--rollout.timeout_s", "200")
    (warning,) = load(*shorter).warnings
    assert "vllm.hang_timeout_s 300 is not below rollout.timeout_s 200" in warning
    assert load(*shorter, "--vllm.hang_timeout_s", "100").warnings == ()
    assert load(*shorter, "--vllm.max_restarts", "0").warnings == ()


def test_the_placement_shows_which_ranks_share_gpus_with_which_engine(load):
    table = placement_table(load(*COLOCATED, *TWO_ENGINES))
    assert "2 vLLM engines x tp 1, bf16, on the GPUs of these policy ranks\n" in table
    assert "  engine 0: rank 0\n  engine 1: rank 1\n" in table
    assert "their own GPUs, placed by Ray" in placement_table(load())


# ---- critic, reference and KL penalty


GAE = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")
KL = ("--algo.kl.init_coef", "0.01", "--algo.kl.use_loss")
NO_KL = ("--algo.kl.init_coef", "0")


def test_gae_gets_its_options_from_openrlhfs_flags(load):
    words = [
        *GAE,
        *NO_KL,
        "--algo.advantage.gamma",
        "0.99",
        "--algo.advantage.lambd",
        "0.95",
        "--actor.eps_clip",
        "0.1",
    ]
    assert algorithm_options(load(*words))[1] == {
        "gamma": 0.99,
        "lambd": 0.95,
        "clip_low": 0.1,
        "clip_high": 0.1,
    }
    assert algorithm_options(load(*GAE, *NO_KL, "--algo.gae.lambd", "0.9"))[1] == {"lambd": 0.9}


def test_two_values_for_lambda_are_refused(problems):
    (message,) = problems(*GAE, "--algo.advantage.lambd", "0.95", "--algo.gae.lambd", "0.9")
    assert "algo.advantage.lambd and algo.gae.lambd" in message


def test_a_single_response_per_prompt_is_enough_for_a_critic(problems):
    single = ["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8"]
    assert problems(*GAE, *single) == []
    assert "compares" in problems(*single)[0]


def test_the_kl_penalty_becomes_an_argument_of_the_algorithm(load):
    assert algorithm_options(load(*KL))[1]["kl"] == {
        "coef": 0.01,
        "estimator": "k1",
        "place": "loss",
    }
    in_reward = algorithm_options(load("--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k3"))[
        1
    ]["kl"]
    assert in_reward == {"coef": 0.1, "estimator": "k3", "place": "reward"}


def test_the_critic_has_the_policys_layout_where_it_has_none_of_its_own(load):
    layout = [
        "--actor.num_gpus_per_node",
        "4",
        "--megatron.tensor_parallel_size",
        "2",
        "--megatron.pipeline_parallel_size",
        "2",
        "--megatron.sequence_parallel_enable",
    ]
    config = load(*GAE[:2], "--critic.num_gpus_per_node", "4", *layout)
    assert (
        config.critic_layout == config.layout_on(4)
        and config.critic_ranks == 4
        and config.training_ranks == 8
    )
    own = load(*GAE, *layout, "--critic.megatron.tensor_parallel_size", "1").critic_layout
    assert (own.tensor_parallel_size, own.pipeline_parallel_size) == (1, 2)
    assert not own.sequence_parallel, "sequence parallelism needs tensor parallelism"
    assert load().critic_ranks == 0


def test_models_with_a_value_head_have_even_stages(load, problems):
    """The policy's last stage has fewer layers for its head; a value head weighs nothing."""
    uneven = (
        "--megatron.pipeline_parallel_size",
        "2",
        "--megatron.decoder_last_pipeline_num_layers",
        "1",
    )
    reward = (
        "--reward.model_name_or_path",
        "model",
        "--reward.num_gpus_per_node",
        "2",
        "--reward.remote_url",
        "null",
    )
    config = load(*GAE, *uneven, *reward)
    assert config.layout.stage_layers(4) == [3, 1] == config.layout_on(2).stage_layers(4)
    assert config.critic_layout.stage_layers(4) == config.reward_layout.stage_layers(4) == [2, 2]
    assert (
        "needs megatron.pipeline_parallel_size > 1: got 1 and 1; leave it out"
        in problems(*uneven[2:])[0]
    )


def test_the_critics_ranks_are_whole_copies_of_it(problems):
    (message,) = problems(
        *GAE[:2], "--critic.num_gpus_per_node", "3", "--critic.megatron.tensor_parallel_size", "2"
    )
    assert "got 3 ranks, 2 * 1 * 1 = 2" in message and "critic.num_gpus_per_node" in message


def test_interleaving_needs_stages_and_layers(problems):
    vp = ["--critic.megatron.virtual_pipeline_size", "2"]
    assert "needs critic.megatron.pipeline_parallel_size > 1: got 2 and 1" in problems(*GAE, *vp)[0]
    assert problems(*GAE, *vp, "--critic.megatron.pipeline_parallel_size", "2") == []
    found = problems(
        *GAE[:2],
        "--critic.num_gpus_per_node",
        "4",
        *vp,
        "--critic.megatron.pipeline_parallel_size",
        "4",
    )
    assert (
        "critic.megatron.virtual_pipeline_size must divide the model's layers: got 4 * 2"
        in found[0]
    )


def test_the_critics_model(problems, run_dir):
    (run_dir / "critic").mkdir()
    (run_dir / "critic/model.safetensors").touch()

    def with_model(**changes):
        (run_dir / "critic/config.json").write_text(json.dumps(MODEL | changes))
        return problems(
            *GAE,
            "--critic.model_name_or_path",
            "critic",
            "--critic.megatron.tensor_parallel_size",
            "2",
        )

    assert with_model() == []
    (message,) = problems(*GAE, "--critic.megatron.expert_parallel_size", "2")
    assert "critic.megatron.expert_parallel_size applies only to mixtures of experts" in message
    assert (
        "must know the tokens of the policy: its vocabulary has 50" in with_model(vocab_size=50)[0]
    )
    assert (
        "must divide the model's attention heads: got 2, the model of critic.model_name_or_path "
        "has 5" in with_model(num_attention_heads=5, num_key_value_heads=5, head_dim=32)[0]
    )
    (message,) = with_model(
        num_attention_heads=6, num_key_value_heads=3, head_dim=32, intermediate_size=516
    )
    assert (
        "must divide the model's key-value heads (query groups) or be a multiple of them: got 2"
        in message
    )
    assert with_model(num_key_value_heads=1) == []
    assert "256 > 64 tokens" in with_model(max_position_embeddings=64)[0]
    assert problems(*GAE, "--critic.model_name_or_path", "nowhere/at/all")


def test_no_reference_is_built_unless_something_needs_it(load):
    assert not load().has_reference and load().reference_ranks == 0
    assert load(*KL).has_reference and load(*KL).reference_ranks == 0, (
        "a copy in the policy's host memory"
    )
    assert load("--algo.grpo.kl_coef", "0.1").has_reference
    assert not load("--algo.dapo.kl_coef", "0.1").has_reference, "another estimator's option"


def test_a_reference_gets_ranks_of_its_own_when_it_asks_for_them(load, problems):
    own = ["--ref.num_gpus_per_node", "2"]
    assert load(*KL, *own).reference_ranks == 2 and load(*KL, *own).training_ranks == 4
    assert load(*KL, *own, "--train.colocate_actor_ref").reference_ranks == 0
    assert load(*own).reference_ranks == 0
    (message,) = problems(*KL, "--ref.num_gpus_per_node", "4", "--train.colocate_actor_ref")
    assert "ref.num_nodes * ref.num_gpus_per_node = 4" in message
    (message,) = problems(
        *KL, "--ref.num_gpus_per_node", "3", "--megatron.tensor_parallel_size", "2"
    )
    assert "got 3 and 2" in message
    (message,) = problems(*KL, *own, "--ref.offload")
    assert "leave one of them out" in message


def test_the_gradient_of_a_penalty_in_the_loss(load, problems):
    unbiased = load(*KL, "--algo.kl.unbiased_gradient")
    assert (
        algorithm_options(unbiased)[1]["kl"]["unbiased_gradient"] is True and not unbiased.warnings
    )
    assert any("expected gradient of k1 is 0" in warning for warning in load(*KL).warnings)
    assert not any("k1" in warning for warning in load(*KL, "--algo.kl.estimator", "k3").warnings)


def test_the_adaptive_controller(problems):
    assert problems(*KL, "--algo.kl.target", "0.1") == []
    assert "needs algo.kl.init_coef > 0" in problems("--algo.kl.target", "0.1")[0]
    (message,) = problems(*KL, "--algo.kl.target", "0.1", "--algo.kl.horizon", "6")
    assert "got 6 samples and 32" in message


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--critic.adam.lr", "1e-4"], "critic.adam.lr"),
        (["--algo.advantage.lambd", "0.9"], "algo.advantage.lambd"),
        (["--algo.kl.estimator", "k3"], "algo.kl.estimator"),
        (["--ref.num_gpus_per_node", "2"], "ref.num_gpus_per_node"),
    ],
)
def test_settings_without_effect_are_warned_about(load, words, name):
    assert any(warning.startswith(f"{name} has no effect") for warning in load(*words).warnings)


def test_a_colocated_critic_shares_the_gpus_of_the_policy(problems):
    colocated = ["--train.colocate_all", "--vllm.num_engines", "2"]
    assert problems(*GAE, *colocated, "--critic.num_gpus_per_node", "2") == []
    (message,) = problems(*GAE, *colocated, "--critic.num_gpus_per_node", "4")
    assert "because the critic shares the policy's GPUs: got 4 and 2" in message


def test_the_placement_shows_where_critic_and_reference_are(load):
    table = placement_table(load(*GAE, "--algo.kl.init_coef", "0.1"))
    assert "critic: 2 ranks = tp 1 x cp 1 x pp 1 x dp 2, from the model of the policy" in table
    assert "reference: in the host memory of the policy's ranks" in table
    table = placement_table(load(*KL, "--ref.num_gpus_per_node", "4"))
    assert "reference: 4 ranks of its own" in table and "critic" not in table


def test_a_printed_configuration_asks_for_no_other_reference(load, tmp_path):
    for words, ranks in (([], 0), (["--ref.num_gpus_per_node", "8"], 8)):
        config = load(*KL, *words)
        (tmp_path / "again.yaml").write_text(format_config(config))
        again = yaml.safe_load((tmp_path / "again.yaml").read_text())
        assert ("num_gpus_per_node" in again.get("ref", {})) == bool(words)
        assert config.reference_ranks == ranks
