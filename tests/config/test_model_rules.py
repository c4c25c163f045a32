"""Rules about models: any layout of any model, and the guide, which reads the policy's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config import format_config, placement_table
from openrlhf_ext.config.model_rules import _heads_divisible, cpu_engine_violations, divisible
from openrlhf_ext.driver import preflight
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.options.sections import Megatron
from tests.config.conftest import MIXTURE, MODEL, TOKENIZER

sizes = st.integers(1, 12)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return read_model_shape(folder)


def found(shape: ModelShape, **layout: int) -> list[str]:
    return [
        v.message
        for v in divisible(
            "actor.model_name_or_path", shape, "megatron.{}".format, Megatron(**layout)
        )
    ]


@given(heads=sizes, groups=sizes, layers=sizes, tp=sizes, pp=sizes)
def test_the_model_can_be_cut(shape, heads, groups, layers, tp, pp):
    shape = replace(
        shape, num_heads=heads, num_kv_heads=groups, num_layers=layers, ffn_hidden_size=tp
    )
    broken = (heads % tp != 0) + (groups % tp != 0 and tp % groups != 0) + (layers % pp != 0)
    assert len(found(shape, tensor_parallel_size=tp, pipeline_parallel_size=pp)) == broken


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    return read_model_shape(folder)


TP2 = {"tensor_parallel_size": 2, "sequence_parallel_enable": True}


def test_experts_can_be_cut(mixture):
    assert found(mixture, expert_parallel_size=4) == found(mixture, **TP2) == []
    assert found(mixture, context_parallel_size=2) == []
    assert (
        found(
            mixture,
            **TP2,
            expert_parallel_size=2,
            expert_tensor_parallel_size=2,
            pipeline_parallel_size=2,
        )
        == []
    )
    (message,) = found(mixture, expert_parallel_size=3)
    assert message == (
        "megatron.expert_parallel_size must divide the model's experts: got 3, the model of "
        "actor.model_name_or_path has 8; use 1, 2, 4, 8"
    )
    (message,) = found(mixture, expert_parallel_size=2, expert_tensor_parallel_size=5)
    assert (
        "megatron.expert_tensor_parallel_size must divide the model's expert width: got 5"
        in message
    )
    (message,) = found(mixture, **TP2, expert_tensor_parallel_size=1)
    assert (
        "by megatron.tensor_parallel_size only, here 2: got megatron.expert_tensor_parallel_size 1"
        in message
    )
    (message,) = found(mixture, context_parallel_size=2, pipeline_parallel_size=2)
    assert (
        "got megatron.context_parallel_size 2 with megatron.pipeline_parallel_size 2; leave it out"
        in message
    )
    (message,) = found(mixture, tensor_parallel_size=2)
    assert message.endswith("above 1: got 2 without it; add megatron.sequence_parallel_enable")


EP2 = ("--megatron.expert_parallel_size", "2")


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("qwen2", EP2, "megatron.expert_parallel_size applies only to mixtures of experts"),
        (
            "qwen2",
            ("--megatron.recompute", "selective", "--megatron.recompute_modules", "moe"),
            "use mlp",
        ),
        (
            "qwen2",
            ("--actor.aux_loss_coef", "0.1"),
            "actor.aux_loss_coef applies only to mixtures of experts",
        ),
        (
            "qwen2",
            ("--train.routing_replay", "policy"),
            "train.routing_replay applies only to mixtures of experts",
        ),
        ("qwen3_moe", ("--train.routing_replay", "policy", "--actor.aux_loss_coef", "0.1"), ""),
        (
            "qwen3_moe",
            ("--megatron.recompute", "selective", "--megatron.recompute_modules", "mlp"),
            "use moe",
        ),
        (
            "qwen3_moe",
            ("--fp8.rollout_enable",),
            "fp8.rollout_enable is not supported for mixtures of experts",
        ),
        ("qwen3_moe", ("--vllm.tensor_parallel_size", "4", "--actor.num_gpus_per_node", "4"), ""),
        (
            "qwen3_moe",
            ("--ds.lora.rank", "4", "--ds.lora.target_modules", "gate_proj"),
            "target modules must be all-linear or some of q_proj, k_proj, v_proj, o_proj, got "
            "gate_proj",
        ),
        (
            "qwen3_moe",
            ("--train.routing_replay", "rollout"),
            "needs vllm.enable_prefix_caching true, got false",
        ),
        ("qwen3_moe", ("--train.routing_replay", "rollout", "--vllm.enable_prefix_caching"), ""),
        (
            "qwen3_moe",
            ("--megatron.expert_parallel_size", "4"),
            "megatron.expert_parallel_size must divide the ranks",
        ),
    ],
)
def test_what_only_mixtures_or_only_dense_models_have(problems, run_dir, family, words, message):
    (run_dir / "model/config.json").write_text(json.dumps(MODEL if family == "qwen2" else MIXTURE))
    every = problems(*words)
    assert any(message in found for found in every) if message else not every, every


def test_what_engines_lack_for_models_with_gated_delta_nets(problems, load, run_dir, monkeypatch):
    config = {**MODEL, "model_type": "qwen3_5_text", "head_dim": 32}
    config |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    (run_dir / "model/config.json").write_text(json.dumps(config))
    (message,) = problems("--fp8.rollout_enable")
    assert "fp8.rollout_enable is not supported for gated delta nets" in message
    words = ("--vllm.enable_prefix_caching", "--ds.lora.rank", "4")
    caching, adapters = (each.message for each in cpu_engine_violations(load(*words)))
    assert caching.startswith("vllm.enable_prefix_caching must be false, because the model of")
    assert adapters.startswith("vllm.lora must be merged") and "engines run on CPU" in adapters
    assert not [*cpu_engine_violations(load("--ds.lora.rank", "4", "--vllm.lora", "merged"))]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for gpus, count in (([], 2), (["/dev/nvidia0"], 0)):
        monkeypatch.setattr(preflight, "gpus_here", lambda gpus=gpus: gpus)
        assert len([*preflight.engine_violations(load(*words))]) == count
    (run_dir / "model/config.json").write_text(json.dumps(MODEL))
    assert not [*cpu_engine_violations(load(*words))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decoder_sparse_step": 2},
            "decoder_sparse_step must be 1, all layers being alike, got 2",
        ),
        (
            {"mlp_only_layers": [0]},
            "mlp_only_layers must be empty, all layers being alike, got [0]",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must not exceed num_experts, got 9 of 8"),
        (
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok must be at least 2 with",
        ),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_a_mixture_that_is_not_built_is_refused(problems, run_dir, change, message):
    (run_dir / "model/config.json").write_text(json.dumps(MIXTURE | change))
    (found,) = problems()
    assert message in found


def test_every_chunk_has_layers(shape):
    def chunks(vp: int) -> list[str]:
        return found(
            replace(shape, num_layers=8), pipeline_parallel_size=2, virtual_pipeline_size=vp
        )

    assert chunks(2) == chunks(4) == []
    (message,) = chunks(3)
    assert "got 2 * 3" in message and "use a megatron.virtual_pipeline_size of 1, 2, 4" in message


def test_stages_with_layers_of_their_own_leave_the_others_alike(shape):
    first, last = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"

    def problems(**layout: int | str) -> list[str]:
        return found(replace(shape, num_layers=28), **{"pipeline_parallel_size": 4, **layout})

    assert problems(**{last: 4}) == problems(**{first: 6, last: 6}) == problems(**{first: 4}) == []
    (message,) = problems(**{last: 5})
    assert message == (
        "megatron.decoder_last_pipeline_num_layers must leave the other stages an equal number of "
        "layers, at least one each: got megatron.decoder_last_pipeline_num_layers 5 with "
        "megatron.pipeline_parallel_size 4; of the model of actor.model_name_or_path, 23 of 28 "
        "layers are left for 3 of 4 stages; use a megatron.decoder_last_pipeline_num_layers of 1 "
        "or 4 or 7"
    )
    (message,) = problems(**{first: 20, last: 15, "pipeline_parallel_size": 2})
    assert (
        "-7 of 28 layers are left for 0 of 2 stages; use a "
        "megatron.decoder_last_pipeline_num_layers of 8" in message
    )
    (message,) = problems(**{first: 27})
    assert "use a megatron.decoder_first_pipeline_num_layers of 19 or 22 or 25" in message
    assert problems(**{last: 4, "virtual_pipeline_size": 4}) == []
    (message,) = problems(**{last: 10, "virtual_pipeline_size": 4})
    assert (
        "must divide every stage: got 4 and stages of 6 or 10 layers" in message
        and "size of 1, 2" in message
    )
    full = {"recompute": "full", "recompute_num_layers": 4}
    (message,) = problems(**{last: 10, **full})
    assert "a chunk of the model of actor.model_name_or_path has 6 or 10; use 1, 2" in message
    (message,) = problems(**{last: 4, "pipeline_parallel_size": 16})
    assert "use a megatron.decoder_last_pipeline_num_layers of 13" in message


def test_an_engine_may_replicate_key_value_heads_but_not_split_them_unevenly(shape):
    def broken(size: int, kv_heads: int) -> int:
        model = replace(shape, num_heads=24, num_kv_heads=kv_heads)
        return len(
            list(
                _heads_divisible(
                    "actor.model_name_or_path", model, "vllm.tensor_parallel_size", size
                )
            )
        )

    assert (broken(4, 8), broken(8, 4), broken(6, 4), broken(5, 5)) == (0, 0, 1, 1)


# ---- the guide


MIXED = ("--algo.advantage.estimator", "mixed_policy_dapo")
GUIDE = (*MIXED, "--guide.model_name_or_path", "guide")


def write_model(folder: Path, tokenizer: dict[str, Any] = TOKENIZER, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()


@pytest.fixture
def run_dir(run_dir: Path) -> Path:
    """With a guide beside the policy."""
    write_model(run_dir / "model")
    write_model(run_dir / "guide")
    return run_dir


def test_a_guide_is_there_only_where_the_estimator_has_one(load):
    config = load(*GUIDE, "--guide.samples_per_prompt", "2")
    assert (config.has_guide, config.guide_samples, config.guide_ranks) == (True, 2, 0)
    assert (config.training_ranks, config.engine_workers) == (2, 2)
    own = load(*GUIDE, "--guide.num_gpus_per_node", "4", "--guide.num_engines", "3")
    assert (own.guide_ranks, own.training_ranks, own.engine_workers) == (4, 6, 4)
    for words in (MIXED, GUIDE[2:]):
        config = load(*words)
        assert not config.has_guide and config.guide_samples == config.guide_ranks == 0
        assert config.engine_workers == 1


@pytest.mark.parametrize(
    "words", [("--guide.model_name_or_path", "guide"), ("--guide.samples_per_prompt", "2")]
)
def test_another_estimator_has_no_guide(load, words):
    (warning,) = [warning for warning in load(*words).warnings if "guide" in warning]
    assert warning.startswith(f"{words[0][2:]} has no effect: got ")


def test_how_the_guide_samples_without_a_guide(load):
    assert any(
        warning.startswith(
            "guide.num_engines has no effect: got 2, and guide.model_name_or_path is not set"
        )
        for warning in load(*MIXED, "--guide.num_engines", "2").warnings
    )


def test_a_batch_of_failures_needs_a_guide(problems):
    (message,) = problems(*MIXED, "--algo.mixed_policy_dapo.zero_batch", "true")
    assert "algo.mixed_policy_dapo.zero_batch needs log-probs of a guide" in message
    assert "set guide.model_name_or_path" in message
    assert problems(*MIXED, "--algo.mixed_policy_dapo.zero_batch", "false") == []
    assert problems(*GUIDE, "--algo.mixed_policy_dapo.zero_batch", "true") == []


def test_the_policy_has_a_part_in_every_group(problems):
    assert problems(*GUIDE, "--guide.samples_per_prompt", "3") == []
    (message,) = problems(*GUIDE, "--guide.samples_per_prompt", "4")
    assert message.startswith("guide.samples_per_prompt must be below rollout.n_samples_per_prompt")
    assert "got 4 and 4" in message
    assert problems(*GUIDE, "--guide.samples_per_prompt", "0")


def test_shared_gpus_and_ranks_that_hold_no_whole_copy(problems):
    (message,) = problems(*GUIDE, "--train.colocate_all", "--vllm.num_engines", "2")
    assert "guide.model_name_or_path and train.colocate_all cannot be used together" in message
    tp2 = ("--megatron.tensor_parallel_size", "2")
    (message,) = problems(*GUIDE, *tp2, "--guide.num_gpus_per_node", "3")
    assert "multiple of the ranks of one copy of the policy" in message and "got 3 and 2" in message
    assert problems(*GUIDE, *tp2, "--guide.num_gpus_per_node", "4") == []


def renamed(tokenizer: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {**tokenizer, "model": {**tokenizer["model"], **model}}


def test_a_tokenizer_that_cannot_be_read_is_said_with_its_file(problems, run_dir):
    (run_dir / "guide/tokenizer.json").write_text(json.dumps({"model": None}))
    found = problems(*GUIDE)
    assert all("guide/tokenizer.json" in message for message in found)
    assert (
        "cannot be read as a tokenizer" in found[0] and "model must be a map, got null" in found[1]
    )


@pytest.mark.parametrize(
    ("tokenizer", "difference"),
    [
        (renamed(TOKENIZER, merges=[["a", "b"]]), None),  # another form of the same
        (renamed(TOKENIZER, merges=[]), "the same tokens but different merges"),
        (
            renamed(TOKENIZER, vocab={"a": 1, "b": 0, "ab": 2}),
            "2 token ids mean different tokens, id 0 is 'b' and 'a'",
        ),
        (
            {**TOKENIZER, "added_tokens": []},
            "1 token ids mean different tokens, id 3 is None and '<end>'",
        ),
    ],
)
def test_a_token_is_the_same_to_both(problems, run_dir, tokenizer, difference):
    write_model(run_dir / "guide", tokenizer)
    found = problems(*GUIDE)
    assert len(found) == (difference is not None), found
    if difference is not None:
        assert (
            "must have the tokenizer of actor.model_name_or_path" in found[0]
            and difference in found[0]
        )
        assert "use a guide of the policy's family" in found[0]


def test_tokenizers_in_other_files(problems, run_dir):
    (run_dir / "guide/tokenizer.json").unlink()
    (message,) = problems(*GUIDE)
    assert message.startswith("guide.model_name_or_path:") and "holds no tokenizer" in message
    (run_dir / "guide/tokenizer.model").write_bytes(b"x")
    (message,) = problems(*GUIDE)
    assert "guide has tokenizer.model and" in message
    (run_dir / "model/tokenizer.json").unlink()
    for same in (True, False):
        (run_dir / "model/tokenizer.model").write_bytes(b"x" if same else b"y")
        assert bool(problems(*GUIDE)) != same


@pytest.mark.parametrize(
    ("changes", "words", "wanted"),
    [
        ({"vocab_size": 104}, (), "got 104 and 101; use a guide of the policy's family, or resize"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32},
            ("--megatron.tensor_parallel_size", "2"),
            "the model of guide.model_name_or_path has 9",
        ),
        (
            {"max_position_embeddings": 128},
            (),
            "data.max_len must not exceed the model's max_position_embeddings",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 255},
            (),
            "attention window of the model of guide.model_name",
        ),
    ],
)
def test_the_guides_model(problems, run_dir, changes, words, wanted):
    write_model(run_dir / "guide", **changes)
    found = problems(*GUIDE, *words)
    assert any(wanted in message for message in found), found


def test_the_placement_and_the_printed_configuration(load: Callable[..., Any], tmp_path: Path):
    table = placement_table(load(*GUIDE, "--guide.num_engines", "2"))
    assert "guide: in the host memory of the policy's ranks, from " in table
    assert "rollout of the guide: 2 vLLM engines x tp 1" in table
    assert "1 responses per prompt, the policy's engines sample 3" in table
    assert "guide" not in placement_table(load(*MIXED))
    for words, ranks in (([], 0), (["--guide.num_gpus_per_node", "8"], 8)):
        config = load(*GUIDE, *words)
        shown = yaml.safe_load(format_config(config))
        assert ("num_gpus_per_node" in shown["guide"]) == bool(
            words
        ) and config.guide_ranks == ranks


# ---- a reward model


REWARD = (
    "--reward.remote_url",
    "null",
    "--reward.model_name_or_path",
    "rm",
    "--reward.num_gpus_per_node",
    "2",
)
GAE = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")


def test_a_reward_model_is_there_only_without_another_source_of_rewards(load, run_dir):
    write_model(run_dir / "rm")
    config = load(*REWARD, *GAE)
    assert (config.has_reward_model, config.reward_ranks, config.training_ranks) == (True, 2, 6)
    assert config.critic_model.endswith("/rm") and config.warnings == ()
    assert (
        "reward model: 2 ranks, in the policy's layout, on their own GPUs, from "
        in placement_table(config)
    )
    beside = load(*REWARD[2:], *GAE)
    assert (beside.has_reward_model, beside.reward_ranks) == (
        False,
        0,
    ) and beside.critic_model.endswith("/model")
    assert any(
        "reward.model_name_or_path has no effect" in said and "remote_url" in said
        for said in beside.warnings
    )
    shared = load(*REWARD, *GAE, "--train.colocate_critic_reward")
    assert shared.critic_shares_with_reward and "on GPUs of the critic" in placement_table(shared)
    assert (config.training_gpus, shared.training_gpus, shared.training_ranks) == (6, 4, 6)
    everything = load(
        *REWARD, *GAE, "--train.colocate_all", "--vllm.num_engines", "2", "--reward.offload"
    )
    assert everything.training_gpus == 2 and not everything.critic_shares_with_reward
    (idle,) = load(*REWARD, "--reward.timeout_s", "7").warnings
    assert idle.startswith(
        "reward.timeout_s has no effect: got 7, and reward.model_name_or_path grades"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--reward.num_gpus_per_node", "3", "--megatron.tensor_parallel_size", "2"),
            "got 3 and 2; use another",
        ),
        (
            (*GAE, "--reward.num_gpus_per_node", "1", "--train.colocate_critic_reward"),
            "got 2 and 1; make them equal",
        ),
        (
            ("--reward.num_gpus_per_node", "4", "--train.colocate_all", "--vllm.num_engines", "2"),
            "because the reward model shares the policy's GPUs: got 4 and 2",
        ),
        (
            ("--algo.dynamic_filtering_enable",),
            "algo.dynamic_filtering_enable needs rewards that come with",
        ),
        (
            ("--eval.dataset", "train.jsonl"),
            "eval.dataset needs rewards that come with the responses",
        ),
    ],
)
def test_where_a_reward_model_goes_and_what_it_cannot_grade(problems, run_dir, words, message):
    write_model(run_dir / "rm")
    (found,) = problems(*REWARD, *words)
    assert message in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 50}, "must know the tokens of the policy: its vocabulary has 50"),
        (
            {"max_position_embeddings": 64},
            "256 > 64 tokens of the model of reward.model_name_or_path",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            "got 256 > 64 tokens; set data.max_len to at most 64",
        ),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"mean": 0.5}, "std"),
        ({"mean": 0.5, "std": 0}, "std must be a number above 0"),
    ],
)
def test_a_reward_model_that_cannot_be_used(problems, run_dir, change, message):
    write_model(run_dir / "rm", **change)
    (found,) = problems(*REWARD, "--reward.normalize_enable")
    assert message in found


def test_a_reward_model_gets_the_policys_tokens(load, problems, run_dir):
    more = {
        **TOKENIZER,
        "added_tokens": [*TOKENIZER["added_tokens"], {**TOKENIZER["added_tokens"][0], "id": 4}],
    }
    write_model(run_dir / "rm", more)
    assert problems(*REWARD) == [], "tokens of its own are never read"
    other = {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"b": 0, "a": 1, "ab": 2}}}
    write_model(run_dir / "rm", other)
    (message,) = problems(*REWARD)
    assert (
        "2 token ids mean different tokens, id 0 is 'a' and 'b'" in message
        and "reward.remote_url" in message
    )


def test_what_normalizing_changes(load, run_dir):
    write_model(run_dir / "rm")
    (said,) = load(*REWARD, "--reward.normalize_enable").warnings
    assert said.endswith(
        "has no effect on reward.model_name_or_path, because its config.json has no mean and std"
    )
    write_model(run_dir / "rm", mean=0.5, std=2)
    assert load(*REWARD, "--reward.normalize_enable").warnings == ()
    write_model(run_dir / "own")
    own = ("--critic.model_name_or_path", "own", "--reward.normalize_enable")
    (critic,) = load(*REWARD, *GAE, *own).warnings
    assert "has no effect on critic.model_name_or_path" in critic
    (policy,) = load(*GAE, "--reward.normalize_enable").warnings
    assert "has no effect on actor.model_name_or_path" in policy
