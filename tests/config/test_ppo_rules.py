"""Critic, reference policy and KL penalty: what is resolved, refused and warned about."""

from __future__ import annotations

import json

import pytest
import yaml

from openrlhf_ext.config import format_config, placement_table
from tests.config.conftest import MODEL

GAE = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")
KL = ("--algo.kl.init_coef", "0.01", "--algo.kl.use_loss")


def test_gae_gets_its_options_from_openrlhfs_flags(load):
    words = [*GAE, "--algo.advantage.gamma", "0.99", "--algo.advantage.lambd", "0.95", "--actor.eps_clip", "0.1"]
    assert load(*words).algorithm_options()[1] == {"gamma": 0.99, "lambd": 0.95, "clip_low": 0.1, "clip_high": 0.1}
    assert load(*GAE, "--algo.gae.lambd", "0.9").algorithm_options()[1] == {"lambd": 0.9}


def test_two_values_for_lambda_are_refused(problems):
    (message,) = problems(*GAE, "--algo.advantage.lambd", "0.95", "--algo.gae.lambd", "0.9")
    assert "algo.advantage.lambd and algo.gae.lambd" in message


def test_a_single_response_per_prompt_is_enough_for_a_critic(problems):
    single = ["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8"]
    assert problems(*GAE, *single) == []
    assert "compares" in problems(*single)[0]


def test_the_kl_penalty_becomes_an_argument_of_the_algorithm(load):
    assert load(*KL).algorithm_options()[1]["kl"] == {"coef": 0.01, "estimator": "k1", "place": "loss"}
    in_reward = load("--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k3").algorithm_options()[1]["kl"]
    assert in_reward == {"coef": 0.1, "estimator": "k3", "place": "reward"}


def test_the_critic_has_the_policys_layout_where_it_has_none_of_its_own(load):
    layout = ["--actor.num_gpus_per_node", "4", "--megatron.tensor_parallel_size", "2",
              "--megatron.pipeline_parallel_size", "2", "--megatron.sequence_parallel_enable"]  # fmt: skip
    config = load(*GAE[:2], "--critic.num_gpus_per_node", "4", *layout)
    assert config.critic_layout == config.megatron and config.critic_ranks == 4 and config.training_ranks == 8
    own = load(*GAE, *layout, "--critic.megatron.tensor_parallel_size", "1").critic_layout
    assert (own.tensor_parallel_size, own.pipeline_parallel_size) == (1, 2)
    assert not own.sequence_parallel_enable, "sequence parallelism needs tensor parallelism"
    assert load().critic_ranks == 0


def test_the_critics_ranks_are_whole_copies_of_it(problems):
    (message,) = problems(*GAE[:2], "--critic.num_gpus_per_node", "3", "--critic.megatron.tensor_parallel_size", "2")
    assert "got 3 ranks, 2 * 1 * 1 = 2" in message and "critic.num_gpus_per_node" in message


def test_interleaving_needs_stages_and_layers(problems):
    vp = ["--critic.megatron.virtual_pipeline_size", "2"]
    assert "needs critic.megatron.pipeline_parallel_size > 1 (unset: that of megatron.*)" in problems(*GAE, *vp)[0]
    assert problems(*GAE, *vp, "--critic.megatron.pipeline_parallel_size", "2") == []
    found = problems(*GAE[:2], "--critic.num_gpus_per_node", "4", *vp, "--critic.megatron.pipeline_parallel_size", "4")
    assert "critic.megatron.virtual_pipeline_size must divide the model's layers: got 4 * 2" in found[0]


def test_the_critics_model(problems, run_dir):
    (run_dir / "critic").mkdir()
    (run_dir / "critic/model.safetensors").touch()

    def with_model(**changes):
        (run_dir / "critic/config.json").write_text(json.dumps(MODEL | changes))
        return problems(*GAE, "--critic.model_name_or_path", "critic", "--critic.megatron.tensor_parallel_size", "2")

    assert with_model() == []
    assert "must know the tokens of the policy: its vocabulary has 50" in with_model(vocab_size=50)[0]
    assert (
        "must divide the model's attention heads: got 2, the model of critic.model_name_or_path has 5"
        in with_model(num_attention_heads=5)[0]
    )
    (message,) = with_model(num_attention_heads=6, num_key_value_heads=3, intermediate_size=516)
    assert "must divide the model's key-value heads (query groups) or be a multiple of them: got 2" in message
    assert with_model(num_key_value_heads=1) == []
    assert "256 > 64 tokens" in with_model(max_position_embeddings=64)[0]
    assert problems(*GAE, "--critic.model_name_or_path", "nowhere/at/all")


def test_no_reference_is_built_unless_something_needs_it(load):
    assert not load().has_reference and load().reference_ranks == 0
    assert load(*KL).has_reference and load(*KL).reference_ranks == 0, "a copy in the policy's host memory"
    assert load("--algo.grpo.kl_coef", "0.1").has_reference
    assert not load("--algo.dapo.kl_coef", "0.1").has_reference, "another estimator's option"


def test_a_reference_gets_ranks_of_its_own_when_it_asks_for_them(load, problems):
    own = ["--ref.num_gpus_per_node", "2"]
    assert load(*KL, *own).reference_ranks == 2 and load(*KL, *own).training_ranks == 4
    assert load(*KL, *own, "--train.colocate_actor_ref").reference_ranks == 0
    assert load(*own).reference_ranks == 0
    (message,) = problems(*KL, "--ref.num_gpus_per_node", "4", "--train.colocate_actor_ref")
    assert "ref.num_nodes * ref.num_gpus_per_node = 4" in message
    (message,) = problems(*KL, "--ref.num_gpus_per_node", "3", "--megatron.tensor_parallel_size", "2")
    assert "got 3 and 2" in message
    (message,) = problems(*KL, *own, "--ref.offload")
    assert "leave one of them out" in message


def test_the_gradient_of_a_penalty_in_the_loss(load, problems):
    unbiased = load(*KL, "--algo.kl.unbiased_gradient")
    assert unbiased.algorithm_options()[1]["kl"]["unbiased_gradient"] is True and not unbiased.warnings
    assert any("gradient of k1 is 0 in the mean" in warning for warning in load(*KL).warnings)
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
    assert "whose GPUs the critic shares: got 4 and 2" in message


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
