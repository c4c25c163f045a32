"""Exact mode: what is refused before anything starts, and where old log-probs and entropies come
from then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.cli import train_ppo_ray
from openrlhf_ext.config import ConfigError, RunConfig, format_config, load_config
from openrlhf_ext.config.estimator import algorithm_options, engine_entropies, old_logprobs
from openrlhf_ext.config.exact_rules import model
from openrlhf_ext.driver import preflight
from openrlhf_ext.exact import limits
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.options import Violation
from tests.config.conftest import MIXTURE, MODEL

EXACT = "--train.exact_rollout_enable"
NAME = EXACT.removeprefix("--")
ENTROPIC = ("--algo.advantage.estimator", "gtpo_entropy")
STALE = ("--train.max_staleness", "2")
CORRECTED = ("--algo.advantage.is_correction_level", "token")
LONGEST = 512


def two(name: str) -> tuple[str, ...]:
    return (f"--{name}.tensor_parallel_size", "2")


TP2 = (*two("megatron"), *two("vllm"))


@pytest.fixture(autouse=True)
def machine() -> Iterator[pytest.MonkeyPatch]:
    """One on which exact mode was tried, whatever this one is. Tests change it by this alone: one
    of two patches of a name would outlive the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(preflight, "gpus_here", list)
        patch.setattr(limits, "vllm_problem", lambda: None)
        patch.setattr(limits, "processor_problem", lambda: None)
        patch.setattr(limits, "longest_sequence", lambda size, head: LONGEST)
        yield patch


@pytest.fixture
def started(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Loads the run with all rules of a start."""
    # the model of run_dir has no tensors
    monkeypatch.setattr(preflight, "checkpoint_violations", lambda config: [])
    return lambda *words: load_config(
        ["--config", "run.yaml", *words], more_rules=preflight.findings
    )


@pytest.fixture
def refused(started: Callable[..., RunConfig]) -> Callable[..., list[Violation]]:
    def found(*words: str) -> list[Violation]:
        with pytest.raises(ConfigError) as caught:
            started(EXACT, *words)
        return [*caught.value.violations]

    return found


def write_model(run_dir: Path, **changes: Any) -> None:
    (run_dir / "model/config.json").write_text(json.dumps(MODEL | changes))


# ---- refused


@pytest.mark.parametrize(
    "words",
    [
        (),
        TP2,
        STALE,
        (*STALE, *CORRECTED),
        ("--algo.old_logprobs", "policy"),
        ("--algo.old_logprobs", "engine"),
        ("--megatron.param_dtype", "fp32"),
        ("--megatron.param_dtype", "fp32", "--vllm.dtype", "fp32"),
        ("--megatron.pipeline_parallel_size", "2"),
        ("--data.max_len", str(LONGEST)),
        ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2"),
        ("--reward.model_name_or_path", "model"),
        ("--rollout.temperature", "0.7"),
    ],
)
def test_what_was_tried_is_taken(started, words):
    started(EXACT, *words)


REFUSED: list[tuple[tuple[str, ...], str, str]] = [
    (("--fp8.enable",), "fp8.enable", "leave fp8.enable out"),
    (("--fp8.rollout_enable",), "fp8.rollout_enable", "leave fp8.rollout_enable out"),
    (("--ds.lora.rank", "8"), "ds.lora.rank", "leave ds.lora.rank out"),
    (
        (*TP2, "--megatron.sequence_parallel_enable"),
        "megatron.sequence_parallel_enable",
        "leave megatron.sequence_parallel_enable out",
    ),
    (
        ("--megatron.context_parallel_size", "2"),
        "megatron.context_parallel_size",
        "leave megatron.context_parallel_size out",
    ),
    (two("megatron"), "vllm.tensor_parallel_size", "got 2 and 1; make them equal"),
    (two("vllm"), "megatron.tensor_parallel_size", "got 1 and 2; make them equal"),
    (("--rollout.top_p", "0.9"), "rollout.top_p", "use rollout.top_p 1"),
    (
        CORRECTED,
        "algo.advantage.is_correction_level",
        "there is nothing to correct; leave algo.advantage.is_correction_level out",
    ),
    (("--vllm.dtype", "fp32"), "vllm.dtype", "got fp32 and bf16; leave vllm.dtype out"),
    (
        ("--data.max_len", str(LONGEST + 1)),
        "data.max_len",
        f"got {LONGEST + 1}; lower it, or leave {NAME} out",
    ),
]


@pytest.mark.parametrize(("words", "option", "says"), REFUSED)
def test_each_refusal_has_option_value_and_remedy(refused, started, words, option, says):
    (violation,) = refused(*words)
    assert {option, NAME} <= {*violation.options} and option in violation.message
    assert NAME in violation.message and violation.message.endswith(says)
    started(*words)  # without exact mode


def test_more_than_two_ranks_are_refused_on_each_side(refused):
    four = ("--actor.num_gpus_per_node", "4", "--megatron.tensor_parallel_size", "4")
    (ranks,) = refused(*four, "--vllm.tensor_parallel_size", "4")[:1]
    assert "megatron.tensor_parallel_size must be at most 2" in ranks.message
    assert "until the sums are in rank order on both sides: got 4; use 1 or 2" in ranks.message
    of_engine = refused(*four, "--vllm.tensor_parallel_size", "4")[1]
    assert "vllm.tensor_parallel_size must be at most 2" in of_engine.message
    assert len(refused(*four)) == 2  # unlike, and one of them too many


def test_replayed_experts_are_refused_with_the_mixture(refused, run_dir):
    (run_dir / "model/config.json").write_text(json.dumps(MIXTURE))
    found = refused("--train.routing_replay", "policy")
    assert [violation.message for violation in found] == [
        f"{NAME} supports dense models of model_type llama, mistral, qwen2, qwen3 with "
        "rope_type default or llama3: the model of actor.model_name_or_path has a mixture of "
        f"experts, model_type qwen3_moe; use another model, or leave {NAME} out",
        f"{NAME} does not work with train.routing_replay policy: it is for mixtures of experts, "
        "which exact mode does not take; leave it out",
    ]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.25,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "llama", "rope_scaling": LLAMA3}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen3", "head_dim": 32}, None),
        ({"rope_scaling": YARN}, "has rope_type yarn;"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has rope_type linear;"),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.75},
            "has model_type phi3, partial_rotary_factor 0.75;",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 16,
                    "long_factor": [2.0] * 16,
                },
            },
            "has model_type phi3, rope_type longrope;",
        ),
        ({"model_type": "smollm3"}, "has model_type smollm3, 1 layers without rotary embedding;"),
        (
            {"model_type": "granite", **GRANITE},
            "has model_type granite, embedding_factor 12, residual_factor 0.5, logits_divisor 8, "
            "attention_scale 0.25;",
        ),
        ({"model_type": "seed_oss", "attention_bias": True}, "has model_type seed_oss;"),
    ],
)
def test_models_that_were_not_tried_are_refused(started, run_dir, changes, says):
    write_model(run_dir, **changes)
    shape = read_model_shape(run_dir / "model")
    found = [each.message for each in model(started(), shape, "actor.model_name_or_path")]
    assert found == []
    if says is None:
        started(EXACT)
        return
    with pytest.raises(ConfigError) as caught:
        started(EXACT)
    (violation,) = caught.value.violations
    assert says in violation.message


def test_all_mistakes_are_in_the_report_of_the_command(run_dir, capsys):
    write_model(run_dir, rope_scaling=YARN)
    words = [EXACT, "--fp8.enable", "--rollout.top_p", "0.9", *CORRECTED, *two("vllm")]
    words += ["--data.max_len", str(LONGEST + 1), "--vllm.dtype", "fp32"]
    assert train_ppo_ray.main(["--config", "run.yaml", *words]) == 2
    report = capsys.readouterr().err
    for option in (
        "rope_type yarn",
        "fp8.enable true",
        "rollout.top_p 0.9",
        "is_correction_level token",
        "megatron.tensor_parallel_size must equal",
        "data.max_len must be at most",
        "vllm.dtype must be",
    ):
        assert option in report


def test_another_engine_or_processor_is_refused(refused, machine):
    machine.setattr(limits, "vllm_problem", lambda: "vllm is 0.1, exact mode was written for 2")
    machine.setattr(limits, "processor_problem", lambda: "Snail (arm64): was not tried")
    engine, processor = refused()
    assert engine.message.startswith(f"{NAME}: vllm is 0.1") and "install that" in engine.message
    assert processor.message.startswith(f"{NAME}: Snail (arm64)")


@pytest.mark.parametrize("elsewhere", ["gpus", "cluster"])
def test_rules_of_a_processor_are_not_asked_where_none_computes(started, machine, elsewhere):
    machine.setattr(limits, "processor_problem", lambda: "Snail (arm64): was not tried")
    if elsewhere == "gpus":
        machine.setattr(preflight, "gpus_here", lambda: ["/dev/nvidia0"])
    else:
        machine.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    started(EXACT, "--data.max_len", str(LONGEST + 1))


def test_a_dry_run_warns_of_this_machine(started):
    (warning,) = [
        line
        for line in started(EXACT, "--dry_run", "--data.max_len", str(LONGEST + 1)).warnings
        if line.startswith("on this machine")
    ]
    assert "data.max_len must be at most" in warning


def test_this_machine_is_asked(load, machine):
    machine.undo()
    machine.delenv("RAY_ADDRESS", raising=False)
    machine.setattr(preflight, "gpus_here", list)
    config = load(EXACT, "--data.max_len", "1024")
    allowed = limits.longest_sequence(2, MODEL["hidden_size"] // MODEL["num_attention_heads"])
    found = [each.options[0] for each in preflight.exact_violations(config)]
    is_too_long = limits.processor_problem() is None and allowed < 1024
    assert ("data.max_len" in found) == is_too_long
    assert (NAME in found) == bool(limits.vllm_problem() or limits.processor_problem())


# ---- where log-probs and entropies come from


def estimator(name: str) -> tuple[str, str]:
    return "--algo.advantage.estimator", name


GAE = (*estimator("gae"), "--critic.num_gpus_per_node", "2")


@pytest.mark.parametrize(
    "words",
    [
        (),
        STALE,
        ("--train.max_epochs", "2"),
        ENTROPIC,
        estimator("clip_cov"),
        estimator("rloo"),  # with a KL penalty in the reward
        (*estimator("rloo"), *STALE),
    ],
)
def test_old_logprobs_are_the_engines(started, words):
    config = started(EXACT, *words)
    source, why = old_logprobs(config)
    told = [line for line in config.warnings if "there is no importance correction" in line]
    if config.max_staleness:
        assert why == "exact mode: of tokens that lag, those of the weights that sampled them"
        assert len(told) == 1 and "counts only tokens that do not lag" in told[0]
    else:
        assert why == "exact mode: the engines' log-probs are the policy's" and not told
    assert source == "engine"
    assert config.correction_level == "off" and algorithm_options(config)[2] is None
    assert engine_entropies(config) == (words == ENTROPIC)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--train.drift_check",), "train.drift_check compares them with those after the step"),
        (GAE, "the policy is not trained in the critic's first steps"),
        ((*STALE, *CORRECTED), "the importance correction compares them with the engines'"),
        ((*STALE, *estimator("clip_cov")), "clip_cov chooses tokens by them, and the engines' may"),
        ((*STALE, *ENTROPIC), "gtpo_entropy shapes by entropies, and the engines' may lag behind"),
        (
            (*ENTROPIC, "--algo.entropies", "policy"),
            "gtpo_entropy shapes by entropies, and algo.entropies is policy",
        ),
        (("--algo.old_logprobs", "policy"), "algo.old_logprobs"),
    ],
)
def test_the_policy_computes_what_is_needed_for_another_reason(started, words, why):
    config = started(EXACT, *words)
    source, reason = old_logprobs(config)
    assert source == "policy" and reason.startswith(why) and not engine_entropies(config)
    # tokens that lag are off-policy then
    assert config.correction_level == ("token" if STALE[0] in words else "off")


def test_agents_have_no_entropies(started, run_dir):
    (run_dir / "agent.py").write_text("async def run_agent(prompt, engine):\n    return None\n")
    agent = ("--train.agent_func_path", "agent.py", "--reward.remote_url", "null")
    assert old_logprobs(started(EXACT, *agent))[0] == "engine"
    config = started(EXACT, *agent, *ENTROPIC)
    assert old_logprobs(config) == (
        "policy",
        "gtpo_entropy shapes by entropies, and responses of agents have no entropies",
    )
    assert not engine_entropies(config)


def test_choices_of_the_user_stay(started):
    config = started(
        EXACT, *ENTROPIC, "--algo.old_logprobs", "policy", "--algo.entropies", "engine"
    )
    assert old_logprobs(config)[0] == "policy" and engine_entropies(config)
    for words in (estimator("clip_cov"), estimator("rloo"), ENTROPIC):
        assert old_logprobs(started(EXACT, *words, "--algo.old_logprobs", "engine"))[0] == "engine"


def test_a_choice_of_engines_that_lag_is_refused_where_tokens_are_chosen(refused):
    (violation,) = refused(*STALE, *estimator("clip_cov"), "--algo.old_logprobs", "engine")
    assert "it chooses tokens by the policy's log-probs" in violation.message


def test_late_groups_need_no_correction(started):
    started(EXACT, "--train.max_staleness", "1", "--train.late_groups", "train")


@pytest.mark.parametrize("words", [(), ENTROPIC, (*STALE, *ENTROPIC), (*STALE, *CORRECTED)])
def test_what_is_shown_loads_back_to_the_same_run(started, run_dir, words):
    config = started(EXACT, *words)
    (run_dir / "shown.yaml").write_text(format_config(config))
    again = load_config(["--config", "shown.yaml"], more_rules=preflight.findings)
    assert old_logprobs(again)[0] == old_logprobs(config)[0]
    assert engine_entropies(again) == engine_entropies(config)
    assert again.correction_level == config.correction_level


def test_a_tolerance_has_no_effect(started):
    words = ("--weight_sync.probe_tolerance", "0.1")
    (warning,) = started(EXACT, *words).warnings
    assert warning.startswith("weight_sync.probe_tolerance has no effect: got 0.1, and ")
    assert f"{NAME} compares bits" in warning
    assert started(*words).warnings == ()
