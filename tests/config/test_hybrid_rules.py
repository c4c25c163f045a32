"""What models with gated delta nets do not support is refused by name, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from openrlhf_ext.cli.train_sft import _findings
from openrlhf_ext.driver import preflight as driver_preflight
from openrlhf_ext.megatron.families import family_of, qwen3_5_text
from openrlhf_ext.run import preflight
from tests.config.conftest import MODEL, load_supervised

HYBRID = {
    **MODEL,
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
RANKS = ("--actor.num_gpus_per_node", "4")
TP4 = ("--megatron.tensor_parallel_size", "4", *RANKS)
CP2 = ("--megatron.context_parallel_size", "2")
IN_PROJ = ("--ds.lora.rank", "4", "--ds.lora.target_modules", "q_proj", "in_proj_qkv", "in_proj_a")
OF_ACTOR = "such as the model of actor.model_name_or_path"


@pytest.fixture
def run_dir(run_dir):
    (run_dir / "model/config.json").write_text(json.dumps(HYBRID))
    return run_dir


def test_all_that_is_not_supported_is_in_one_report(problems):
    assert problems() == problems("--megatron.tensor_parallel_size", "2") == []
    found = problems(*CP2, "--fp8.enable", "--fp8.rollout_enable", *TP4)
    wanted = [
        "megatron.tensor_parallel_size must divide the model's key heads of linear attention: got "
        "4, the model of actor.model_name_or_path has 2; use 1, 2",
        "megatron.context_parallel_size must be 1 for the model of actor.model_name_or_path, got "
        "2: the state of a gated delta net runs through the whole sequence; leave it out",
        *(
            f"{name} is not supported for gated delta nets, whose projections have single rows for "
            f"each head, {OF_ACTOR}; leave it out"
            for name in ("fp8.enable", "fp8.rollout_enable")
        ),
    ]
    assert [message for message in found if message in wanted] == wanted, found


def test_adapters_are_of_the_other_linears(problems):
    assert problems("--ds.lora.rank", "4") == []
    (message,) = problems(*IN_PROJ)
    assert "got in_proj_a, in_proj_qkv; adapters of in_proj_qkv, in_proj_a are not built" in message
    assert "out_proj" in message and "(all-linear means the others)" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "for each of the 4 layers, got 3"),
        ({"layer_types": ["full_attention", "mamba"] * 2}, "others are not built, got mamba"),
        ({"output_gate_type": "sigmoid"}, "must be 'silu' or 'swish', got 'sigmoid'"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported: attention of"),
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads, got 3 and 2"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, got 8 and 3"),
        ({"model_type": "qwen3_next"}, "the order of its gated delta nets' projections"),
        ({"model_type": "qwen4_exp"}, "'qwen4_exp': it would need embeddings of n-grams"),
        ({"model_type": "qwen3_5_moe"}, "/model --to FOLDER, and give FOLDER"),
    ],
)
def test_a_configuration_that_is_not_built_is_refused(problems, run_dir, changes, message):
    (run_dir / "model/config.json").write_text(json.dumps(HYBRID | changes))
    (found,) = problems()
    assert message in found


@pytest.fixture
def without_critics(monkeypatch):
    """As a family of which transformers has no sequence classifier."""
    monkeypatch.setattr(qwen3_5_text, "FAMILY", replace(qwen3_5_text.FAMILY, critic_class=""))
    family_of.cache_clear()
    yield
    monkeypatch.undo()
    family_of.cache_clear()


@pytest.mark.usefixtures("without_critics")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--algo.advantage.estimator", "gae"),
            "critic.model_name_or_path: a critic of model_type",
        ),
        (
            ("--reward.model_name_or_path", "model", "--reward.remote_url", ""),
            "reward.model_name_or_path: a reward model of model_type qwen3_5_text is not supported",
        ),
    ],
)
def test_a_model_that_nothing_reads_as_a_critic_is_none(problems, words, message):
    assert any(found.startswith(message) for found in problems(*words)), problems(*words)


@pytest.mark.parametrize(
    ("has_fla", "triton", "gpu", "message"),
    [
        (False, "3.7.1", "NVIDIA A100-SXM4-80GB", "need flash-linear-attention==0.6.0 on GPUs"),
        (True, "3.6.0", "NVIDIA H200", "need Triton 3.7.1 or newer on this machine's GPUs"),
        (True, "3.7.0+git", "NVIDIA GH200 480GB", "whose gradients 3.7.0+git computes wrong"),
        (True, "3.6.0", "NVIDIA B200", ""),
        (True, "3.7.1", "NVIDIA H100 80GB HBM3", ""),
        (True, None, "NVIDIA H100 80GB HBM3", ""),
    ],
)
def test_what_gpus_need_is_asked_before_a_start(load, machine, has_fla, triton, gpu, message):
    machine.setattr(preflight, "has_module", lambda name: has_fla)
    machine.setattr(preflight, "installed_version", lambda name: triton)
    machine.setattr(preflight, "gpu_names", lambda: [gpu])
    found = [
        violation.message
        for violation in driver_preflight.findings(load()).violations
        if "layers of this model need" in violation.message
    ]
    assert len(found) == bool(message) and message in "".join(found)
    machine.setattr(preflight, "gpus_here", list)
    assert [*preflight.kernel_violations(load())] == []


@pytest.fixture
def machine(monkeypatch):
    """One with a GPU."""
    monkeypatch.setattr(preflight, "gpus_here", lambda: ["/dev/nvidia0"])
    # the model of run_dir has no tensors
    monkeypatch.setattr(driver_preflight, "checkpoint_violations", lambda config: [])
    return monkeypatch


def test_a_dry_run_and_supervised_training_say_what_gpus_need(load, machine):
    machine.setattr(preflight, "has_module", lambda name: False)
    needs = "model_name_or_path: layers of this model need flash-linear-attention==0.6.0 on GPUs"
    (warning,) = [
        line for line in driver_preflight.findings(load("--dry_run")).warnings if needs in line
    ]
    assert warning.startswith("on this machine, actor.")
    words = ["--model.model_name_or_path", "model", "--data.dataset", "train.jsonl"]
    words += ["--data.input_key", "question", "--data.output_key", "answer", "--data.max_len", "64"]
    config = load_supervised(words)
    assert any(needs in violation.message for violation in _findings(config).violations)
