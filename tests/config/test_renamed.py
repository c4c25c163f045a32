"""Scripts for earlier releases of OpenRLHF are read in the present names."""

from __future__ import annotations

import pytest

from openrlhf_ext.config import option_table
from openrlhf_ext.config.upstream import RENAMED, present_name


def test_every_present_name_is_an_option_and_no_earlier_one_is():
    for earlier, present in RENAMED.items():
        assert present in option_table(), earlier
        assert earlier not in option_table()


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        ("pretrain", "actor.model_name_or_path"),
        ("micro_train_batch_size", "train.micro_batch_size"),
        # of 0.9.9 to 0.10.1; eval has one of that name too
        ("max_new_tokens", "rollout.max_new_tokens"),
        ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),  # eval has one of that name too
        ("actor_num_nodes", "actor.num_nodes"),
        ("ds_tensor_parallel_size", "ds.tensor_parallel_size"),
        ("max_epochs", "train.max_epochs"),
        ("wandb_project", "logger.wandb.project"),
        ("algo.advantage.is_correction_enable", None),  # together with others: of_earlier
        ("no_such_name", None),
        ("algo.max_epochs", None),
        ("num_nodes", None),
    ],
)
def test_an_earlier_name_has_one_present_name(earlier, present):
    assert present_name(earlier) == present


def test_a_script_of_an_earlier_release_is_read_as_todays(load):
    config = load(
        "--micro_train_batch_size",
        "2",
        "--bf16",
        "--zero_stage",
        "3",
        "--packing_samples",
        "--entropy_loss_coef",
        "0",
        "--prompt_max_len",
        "100",
        "--generate_max_len",
        "50",
        "--advantage_estimator",
        "rloo",
        "--flash_attn",
    )
    assert config.train.micro_batch_size == 2 and config.megatron.param_dtype == "bf16"
    assert (config.data.max_len, config.rollout.max_new_tokens) == (150, 50)
    assert config.algo.advantage.estimator == "rloo" and config.actor.entropy_coef == 0
    names, defaults, zero = config.warnings[:3]
    assert names.startswith(
        "names of an earlier OpenRLHF: micro_train_batch_size, bf16, zero_stage, packing_samples, "
    )
    assert "data.max_len 150" in names and "train.micro_batch_size 2" in names
    assert defaults == (
        "defaults of OpenRLHF 0.9, whose names are used: rollout.micro_batch_size 8"
    )
    assert (
        zero.startswith("ds.zero_stage is not an option of the Megatron policy") and "got 3" in zero
    )


def test_lengths_of_0_10_1_mean_what_they_meant(load, problems):
    """``--max_len`` was of prompt and response, and without ``--max_new_tokens`` a response had the
    rest."""
    config = load("--max_len", "300", "--max_new_tokens", "77")
    assert (config.data.max_len, config.rollout.max_new_tokens) == (300, 77)
    assert (
        "max_new_tokens; they are read as data.max_len 300, rollout.max_new_tokens 77"
        in config.warnings[0]
    )
    assert config.sources["rollout.max_new_tokens"].endswith("under its earlier name")
    (wrong,) = problems("--max_new_tokens", "many")
    assert (
        wrong.startswith("rollout.max_new_tokens: expected integer")
        and "under its earlier name" in wrong
    )


def test_strict_refuses_what_is_otherwise_a_line(load, problems):
    words = (
        "--ds.zero_stage",
        "3",
        "--zero_stage",
        "3",
        "--ds.tensor_parallel_size",
        "1",
        "--vllm.enable_sleep",
    )
    lines = load(*words).warnings
    assert problems(*words, "--strict") == list(lines) and len(lines) == 4
    assert problems("--strict") == []


def test_a_script_without_an_estimator_runs_openrlhfs(load, run_dir):
    run = run_dir / "run.yaml"
    run.write_text(run.read_text().replace("algo.advantage.estimator: grpo\n", ""))
    for words in (
        (),
        ("--micro_train_batch_size", "2"),
        ("--algo.advantage.is_correction_enable",),
    ):
        config = load(*words)
        assert config.algo.advantage.estimator == "gae" and config.algo.kl.init_coef == 0.01
    assert load("--algo.kl.init_coef", "0").algo.kl.init_coef == 0
    assert load("--algo.advantage.estimator", "rloo").algo.kl.init_coef == 0.01
    assert load("--algo.advantage.estimator", "gtpo_entropy").algo.kl.init_coef == 0
    own = load("--algo.advantage.estimator", "rloo", "--algo.rloo.kl_coef", "0.1")
    assert own.algo.kl.init_coef == 0, (
        "a penalty of the method's own takes the place of the default"
    )


@pytest.mark.parametrize(
    ("words", "level", "mode", "threshold"),
    [
        (["--enable_vllm_is_correction"], "token", "clip", [0.5, 5.0]),
        (
            ["--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "2"],
            "token",
            "clip",
            [0.0, 2.0],
        ),
        (
            [
                "--enable_vllm_is_correction",
                "--use_icepop",
                "--vllm_is_truncated_threshold",
                "0.5",
                "5",
            ],
            "token",
            "mask",
            [0.5, 5.0],
        ),
        (
            ["--vllm_enable_is_correction", "--vllm_is_correction_type", "seq-mask-tis"],
            "seq",
            "mask",
            [0.5, 5.0],
        ),
        (["--algo.advantage.is_correction_type", "icepop"], "off", "mask", [0.5, 5.0]),
    ],
)
def test_earlier_corrections_mean_what_they_meant(load, words, level, mode, threshold):
    config = load(*words)
    found = (config.correction_level, config.correction_mode, config.correction_threshold)
    assert found == (level, mode, threshold)


def test_what_an_earlier_release_asks_for_is_judged_as_todays_is(problems):
    (mixed,) = problems("--ptx_coef", "0.05")
    assert mixed.startswith("ptx_coef 0.05 would mix pretraining data into the loss")
    (kind,) = problems("--enable_vllm_is_correction", "--vllm_is_correction_type", "tiss")
    assert "must be one of tis, icepop, seq-mask-tis: got tiss" in kind
    assert problems("--prompt_max_len", "long", "--ptx_coef", "x")[:2] == [
        "ptx_coef: expected a number, got x (command line)",
        "prompt_max_len: expected a number, got long (command line)",
    ]
    (rank,) = problems(
        "--lora_rank", "8", "--vllm.lora", "merged", "--target_modules", "q_proj", "qkv_proj"
    )
    assert (
        "target modules must be all-linear or some of q_proj, k_proj" in rank
        and "got qkv_proj" in rank
    )
    (wrong,) = problems("--micro_train_batch_size", "many")
    assert (
        wrong.startswith("train.micro_batch_size: expected integer")
        and "under its earlier name" in wrong
    )


def test_what_deepspeed_is_given_is_megatrons(load, problems):
    config = load(
        "--ds.tensor_parallel_size", "2", "--ds.ring_attn_size", "1", "--ds.param_dtype", "bf16"
    )
    assert config.megatron.tensor_parallel_size == 2 and config.megatron.context_parallel_size == 1
    assert (
        config.warnings[0] == "ds.tensor_parallel_size 2 is read as megatron.tensor_parallel_size 2"
    )
    both = load("--ds.tensor_parallel_size", "2", "--megatron.tensor_parallel_size", "1")
    assert both.megatron.tensor_parallel_size == 1
    assert both.warnings[0].startswith(
        "ds.tensor_parallel_size has no effect: got 2, and megatron."
    )
    (half,) = problems("--ds.param_dtype", "fp16")
    assert half.startswith("megatron.param_dtype: expected one of") and "as ds.param_dtype" in half


def test_one_earlier_name_offloads_reference_and_reward_model(load):
    config = load("--ref_reward_offload", "--reward_pretrain", "model")
    assert config.ref.offload and config.reward.offload
    alone = load("--ref_reward_offload")
    assert alone.ref.offload and not alone.reward.offload
