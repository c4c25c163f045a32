"""What this package relies on of OpenRLHF 0.11.2: names, signatures, fields. An upgrade shows its drift here."""

# ruff: noqa: E501  (one signature a line)

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib.metadata import version

import pytest

from openrlhf_ext import compat


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]  # Ray adds that one


def test_the_pinned_version_is_installed():
    assert version("openrlhf") == compat.SUPPORTED_OPENRLHF


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (compat.BasePPOTrainer.__init__, "self strategy actor_model_group critic_model_group reward_model_group reference_model_group vllm_engines tokenizer"),
        (compat.BasePPOTrainer.train_step, "self rollout_samples global_step"),
        (compat.BasePPOTrainer.ppo_train, "self global_steps"),
        (compat.BasePPOTrainer.broadcast_to_vllm, "self"),
        (compat.BasePPOTrainer.save_logs_and_checkpoints, "self global_step logs_dict client_states"),
        (compat.PPOTrainer.fit, "self global_step"),
        (compat.PPOTrainer.evaluate, "self global_step generate_kwargs"),
        (compat.RemoteExperienceMaker.__init__, "self actor_model_group critic_model_group reward_model_group initial_model_group kl_controller strategy tokenizer kwargs"),
        (compat.RemoteExperienceMaker.make_experience_batch, "self rollout_samples"),
        (compat.RemoteExperienceMaker._flatten_results, "self refs duplicate_factor"),
        (compat.SamplesGenerator.__init__, "self strategy prompts_dataloader eval_dataloader tokenizer vllm_engines"),
        (compat.SamplesGenerator.generate_samples, "self generate_kwargs"),
        (compat.SamplesGenerator.generate_eval_samples, "self generate_kwargs"),
        (compat.SamplesGenerator._dispatch_prompts_to_vllm, "self prompts labels images generate_kwargs"),
        (compat.SamplesGenerator._generate_vllm, "self dataloader_iter num_prompts dynamic_filtering generate_kwargs"),
        (compat.SamplesGenerator._process_response_into_experience, "self response generate_kwargs"),
        (compat.collect_prompt_batch, "dataloader_iter num_prompts"),
        (compat.RayActorGroup.__init__, "self num_nodes num_gpus_per_node ray_actor_type pg num_gpus_per_actor duplicate_actors resources num_resources_per_node"),
        (compat.RayActorGroup.async_run_method_batch, "self method_name kwargs"),
        (compat.PromptDataset.__init__, "self dataset tokenizer strategy input_template"),
        (compat.blending_datasets, "datasets probabilities strategy seed max_count stopping_strategy dataset_split"),
        (compat.get_tokenizer, "pretrain model padding_side strategy use_fast"),
        (compat.SingleTurnAgentExecutor.execute, "self prompt label sampling_params max_length hf_tokenizer llm_engine images"),
    ],
)  # fmt: skip
def test_signatures(function, expected):
    assert parameters(function) == expected.split()


def test_experience_fields():
    expected = {
        "sequences", "attention_mask", "action_mask", "action_log_probs", "base_action_log_probs", "rollout_log_probs",
        "values", "returns", "advantages", "kl", "rewards", "scores", "response_length", "truncated", "total_length",
        "index", "prompts", "labels", "images", "mm_train_inputs", "info",
    }  # fmt: skip
    assert {f.name for f in fields(compat.Experience)} == expected


def test_what_train_step_calls_and_returns():
    """Our trainer renames these keys and replaces these methods: they must still be upstream's."""
    source = inspect.getsource(compat.BasePPOTrainer.train_step) + inspect.getsource(compat.PPOTrainer.fit)
    for part in (
        "self.experience_maker.make_experience_batch(rollout_samples)", 'method_name="append", experience=experiences',
        "self.ppo_train(global_step)", "self.broadcast_to_vllm()", '"timing/make_experience"', '"timing/ppo_train"',
        '"timing/broadcast"', '"timing/generation"', '"dynamic_filtering_pass_rate"', '"total_consumed_prompts"',
    ):  # fmt: skip
        assert part in source, part


def test_what_the_samples_generator_asks_of_an_engine():
    """controller/samples.py stands in for the engines while upstream distributes the prompts."""
    source = inspect.getsource(compat.SamplesGenerator._dispatch_prompts_to_vllm)
    for part in (
        "ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])",
        "llm_engine = self.vllm_engines[engine_indices[idx]]", "llm_engine.generate_responses.remote(",
    ):  # fmt: skip
        assert part in source, part
    assert source.count("llm_engine.") == 1 and source.count("self.vllm_engines") == 2


def test_plain_classes_can_be_subclassed():
    for plain in (compat.PPOTrainer, compat.RolloutRayActor):
        assert type("Sub", (plain,), {}).__mro__[1] is plain
