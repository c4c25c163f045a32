"""What ``plan --from`` reads: words that bash hands over, files, references; what it refuses.
Tables against their
projects: tests/conformance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.cli.plan import main as plan
from openrlhf_ext.tools.plan.translate import PROJECTS, _table, translate

STARTS = {"verl": "python3 -m verl.trainer.main_ppo", "trl": "accelerate launch grpo.py"}
ACTOR = "actor_rollout_ref.actor."
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."


def words_of_bash(
    script: str, tmp_path: Path, *more: str, project: str = "verl", **environment: str
) -> list[str]:
    """Words behind ``--from`` that bash hands over where the script starts ``plan --from`` in the
    trainer's place."""
    changed = script.replace(STARTS[project], f"openrlhf-ext plan --from {project}")
    assert changed != script
    (tmp_path / "run.sh").write_text(changed)
    command = tmp_path / "openrlhf-ext"
    command.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {tmp_path / 'words'}\n")
    command.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", tmp_path / "run.sh", *more],
        env={**os.environ, **environment, "PATH": path},
        check=True,
    )
    _, option, *words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert option == "--from"
    return words


def leaves(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        found |= (
            leaves(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
        )
    return found


def translated(*words: str, gpus: int | None = None) -> dict[str, Any]:
    return leaves(yaml.safe_load(translate(words, gpus)))


# ---- scripts through bash

# the forms of published scripts: branches, functions, loops over arguments, arrays, nested sums,
# words of several options in one variable, a `#` within a word, an echo of options
BRANCHES = r"""#!/usr/bin/env bash
set -euo pipefail
DEVICE=${DEVICE:-gpu}
train_batch_size=${TRAIN_BATCH_SIZE:-128}
max_response_length=512
mem=${MEM:-}
EXTRA=()
ROLLOUT="actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.9"
longer() { max_response_length=$((1024 * ($1 + 1))); }
case "${DEVICE}" in
    gpu) mem=${mem:-0.6} ;;
    other)
        mem=0.3
        train_batch_size=16
        longer 3
        EXTRA+=(
            actor_rollout_ref.actor.ppo_epochs=4
        )
        ;;
esac
while [[ $# -gt 0 ]]; do
    case "$1" in
        --lr) EXTRA+=(actor_rollout_ref.actor.optim.lr=$2); shift 2 ;;
        *) EXTRA+=("$1"); shift ;;
    esac
done
if false; then
    EXTRA+=(data.train_batch_size=1)
fi
echo "data.train_batch_size=2 actor_rollout_ref.rollout.n=3"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=train.parquet \
    data.train_batch_size=${train_batch_size} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path=model#1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=${mem} \
    $ROLLOUT \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    "${EXTRA[@]}" 2>&1
"""


@pytest.mark.parametrize(
    ("device", "more", "expected"),
    [
        (
            "gpu",
            [],
            {
                "rollout.batch_size": 128,
                "rollout.max_new_tokens": 512,
                "vllm.gpu_memory_utilization": 0.6,
                "train.max_epochs": 1,
                "rollout.n_samples_per_prompt": 8,
                "rollout.temperature": 0.9,
                "train.batch_size": 128,
                "actor.model_name_or_path": "model#1",
                "actor.adam.lr": 1e-6,
            },
        ),
        (
            "other",
            ["--lr", "3e-6", "trainer.total_epochs=2"],
            {
                "rollout.batch_size": 16,
                "rollout.max_new_tokens": 4096,
                "vllm.gpu_memory_utilization": 0.3,
                "train.max_epochs": 4,
                "actor.adam.lr": 3e-6,
                "train.num_episodes": 2,
            },
        ),
    ],
)
def test_a_script_of_verl_comes_out_as_bash_runs_it(device, more, expected, tmp_path):
    ours = translated(*words_of_bash(BRANCHES, tmp_path, *more, DEVICE=device))
    assert {name: ours.get(name) for name in expected} == expected


def test_a_script_of_trl_comes_out_as_bash_runs_it(tmp_path):
    script = (
        "LR=${LR:-1e-6}\naccelerate launch grpo.py \\\n  --learning_rate $LR --use_peft "
        "--lora-r=4 \\\n"
    )
    script += (
        "  --lora_target_modules q_proj v_proj --num_generations 8 --no_gradient_checkpointing "
        '--beta 0 "$@"\n'
    )
    words = words_of_bash(
        script, tmp_path, "--max_completion_length", "64", project="trl", LR="2e-6"
    )
    ours = translated(*words, gpus=4)
    expected = {
        "actor.adam.lr": 2e-6,
        "ds.lora.rank": 4,
        "ds.lora.target_modules": ["q_proj", "v_proj"],
        "rollout.max_new_tokens": 64,
        "actor.gradient_checkpointing_enable": False,
        "algo.kl.init_coef": 0,
        "actor.num_gpus_per_node": 4,
        "rollout.batch_size": 4,
        "train.batch_size": 32,
    }
    assert {name: ours.get(name) for name in expected} == expected
    assert translated(*words, "--gpus", "4") == ours, "behind the project's name too"


# ---- files


def test_nested_maps_of_trl_are_options(tmp_path):
    (tmp_path / "trl.yaml").write_text("""
model_name_or_path: model
dataset_name: train.jsonl
learning_rate: 2.0e-6
num_generations: 16
max_completion_length: 2048
per_device_train_batch_size: 16
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
model_init_kwargs: {attn_implementation: sdpa}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.02
beta: 0.04
""")
    text = translate(["trl", str(tmp_path / "trl.yaml")], 8)
    ours = leaves(yaml.safe_load(text))
    expected = {
        "algo.advantage.estimator": "grpo",
        "rollout.n_samples_per_prompt": 16,
        "actor.adam.lr": 2e-6,
        "algo.kl.init_coef": 0.04,
        "actor.model_name_or_path": "model",
        "data.prompt_dataset": "train.jsonl",
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.min_lr_ratio": 0.02,
    }
    assert {name: ours.get(name) for name in expected} == expected and "no such option" not in text
    assert "# gradient_checkpointing_kwargs.use_reentrant False: Megatron has" in text
    config = ["--config", str(tmp_path / "trl.yaml"), "--lr_scheduler_kwargs", '{"min_lr": 1e-7}']
    assert translated("trl", "--beta=0.1", *config)["actor.min_lr_ratio"] == pytest.approx(0.05)
    assert translated("trl", "--beta=0.1", *config)["algo.kl.init_coef"] == 0.1, (
        "words are stronger than a file"
    )


WHOLE = """
data: {train_batch_size: 64, val_files: "${data.train_files}", train_files: t.parquet}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", optim: {lr: 1e-5}, unknown: "${oc.env:HOME}"}
  rollout: {n: 4, temperature: "${data.train_batch_size}"}
trainer:
  {experiment_name: run, test_freq: 1, default_local_dir: "out/${trainer.experiment_name}/${data.train_batch_size}"}
"""


def test_references_to_options_are_put_in_after_words_have_changed_them(tmp_path):
    (tmp_path / "verl.yaml").write_text(WHOLE)
    ours = translated(
        "verl",
        str(tmp_path / "verl.yaml"),
        "data.train_batch_size=32",
        "+trainer.experiment_name=two",
    )
    expected = {
        "rollout.batch_size": 32,
        "train.batch_size": 128,
        "ckpt.path": "out/two/32",
        "rollout.temperature": 32,
        "rollout.n_samples_per_prompt": 4,
        "eval.dataset": "t.parquet",
        "actor.adam.lr": 1e-5,
    }
    assert {name: ours.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        ("--config-path=FOLDER", "--config-name=mine"),
        ("--config-path", "FOLDER", "--config-name", "mine.yaml"),
    ],
)
def test_the_file_that_hydra_is_given_is_read(words, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 64}\n"
    )
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert translated("verl", *words, "data.max_prompt_length=5")["rollout.batch_size"] == 64
    own = translated(
        "verl", "--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", "data.seed=3"
    )
    assert own == translated("verl", "data.seed=3"), "verl's own file has the table's defaults"


# ---- refusals

FILES = {
    "defaults.yaml": "defaults: [ppo_trainer, {actor: mine}]\ndata: {train_batch_size: 4}\n",
    "env.yaml": "trainer: {project_name: '${oc.env:USER}', nnodes: 1}\n",
    "lost.yaml": "trainer: {project_name: '${trainer.no_such}', nnodes: 1}\n",
    "circle.yaml": "data: {seed: '${data.train_batch_size}', train_batch_size: '${data.seed}'}\n",
    "select.yaml": "trainer: {nnodes: '${oc.select:trainer.no_such,2}', project_name: '${.nnodes}'}\n",
    "last.yaml": "defaults: [_self_, ppo_trainer]\ndata: {train_batch_size: 4}\n",
    "inside.yaml": "data: {train_files: ['${data.val_files}', b], val_files: a}\n",
    "nemo.yaml": "policy: {model_name: m}\ngrpo: {num_prompts_per_step: 32}\ncluster: {num_nodes: 1}\n",
    "trl.yaml": "learning_rate: 1e-6\nbeta: 0.1\ngradient_checkpointing_kwargs: {use_reentrant: false}\n",
    "list.yaml": "[1]\n", "empty.yaml": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            [],
            "takes the name of the project first: openrlhf-ext plan --from verl or openrlhf-ext "
            "plan --from trl",
        ),
        (
            ["trl.yaml"],
            "openrlhf-ext plan --from verl trl.yaml or openrlhf-ext plan --from trl trl.yaml",
        ),
        (
            ["run.sh"],
            "`openrlhf-ext plan --from verl` in the place of `python3 -m verl.trainer.main_ppo`",
        ),
        (
            ["verl", "run.sh", "data.seed=1"],
            "got 'run.sh'; in a shell script write `openrlhf-ext plan --from verl`",
        ),
        (["trl", "run.sh", "--beta=1"], "got 'run.sh'; in a shell script write"),
        (["verl"], "takes a YAML file or options of verl 0.9.1, which knows 0 of the 0 names here"),
        (["trl"], "takes a YAML file or options of TRL 1.16.0"),
        (["trl", "empty.yaml"], "empty.yaml must hold a map of options, got a null"),
        (["verl", "list.yaml"], "list.yaml must hold a map of options, got a list"),
        (
            ["verl", "nemo.yaml"],
            "knows 0 of the 3 names here and not: policy.model_name, grpo.num_prompts_per_step, ",
        ),
        (
            [
                "trl",
                "--hf-checkpoint",
                "x",
                "--rollout-batch-size",
                "3",
                "--beta",
                "1",
                "--n-samples-per-prompt",
                "3",
            ],
            "knows 1 of the 4 names here and not: hf_checkpoint, rollout_batch_size, "
            "n_samples_per_prompt",
        ),
        (["verl", "trl.yaml"], "verl 0.9.1, which knows 0 of the 3 names"),
        (["trl", "whole.yaml"], "TRL 1.16.0, which knows 0 of the"),
        (
            ["verl", "defaults.yaml"],
            "defaults.yaml: its defaults list ['ppo_trainer', {'actor': 'mine'}] takes hydra",
        ),
        (
            ["verl", "last.yaml"],
            "last.yaml: its defaults list ['_self_', 'ppo_trainer'] takes hydra to be read",
        ),
        (
            ["verl", "env.yaml"],
            "trainer.project_name=${oc.env:USER} is no reference to another option that is given",
        ),
        (["verl", "trainer.project_name=${oc.env:USER}"], "takes hydra to be read"),
        (
            ["verl", "lost.yaml"],
            "trainer.project_name=${trainer.no_such} is no reference to another option that is "
            "given",
        ),
        (["verl", "circle.yaml"], "is no reference to another option that is given"),
        (["verl", "select.yaml"], "takes hydra to be read"),
        (["verl", "inside.yaml"], "takes hydra to be read"),
        (
            ["verl", "reward@custom=mine"],
            "takes a YAML file and NAME=VALUE: got 'reward@custom=mine'",
        ),
        (
            ["verl", "~data.train_files", "data.seed=1"],
            "takes a YAML file and NAME=VALUE: got '~data.train_files'",
        ),
        (["verl", "--cfg", "job"], "got '--cfg'"),
        (["verl", "data.seed=1", " "], "got ' '"),
        (["verl", "--config-name=mine"], "config/mine.yaml cannot be read"),
        (
            ["verl", "--config-path=/no/such", "--config-name=mine"],
            "/no/such/mine.yaml cannot be read",
        ),
        (
            ["verl", "actor_rollout_ref.rollout.gpu_memory_utilization="],
            "must be a number, as its default 0.5: got ''",
        ),
        (
            ["verl", "actor_rollout_ref.rollout.n=null"],
            "must be a number, as its default 1: got None",
        ),
        (
            ["trl", "learning_rate=1e-5"],
            "takes a YAML file and --NAME VALUE: got 'learning_rate=1e-5'",
        ),
        (
            ["trl", "--use_peft", "no", "--beta", "x"],
            "use_peft must be true or false, as its default False: got 'no'",
        ),
        (
            ["trl", "--num_generations", "4", "8"],
            "num_generations must be a number, as its default 8: got [4, 8]",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(words, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in {**FILES, "whole.yaml": WHOLE}.items():
        (tmp_path / name).write_text(text)
    assert plan(["--from", *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and said.out == ""


def test_words_ahead_of_from_are_plans_own(capsys):
    assert plan(["--gpus", "2", "--from", "verl", "data.seed=1"]) == 2
    assert "verl has trainer.n_gpus_per_node and trainer.nnodes" in capsys.readouterr().err
    assert plan(["--gpus", "2", "--from", "trl", "--optim", "adamw_torch", "--seed", "1"]) == 0
    assert "num_gpus_per_node: 2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        plan(["--write", "x.yaml", "--from", "verl", "data.seed=1"])
    assert ended.value.code == 2 and "unknown option --write" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        plan(["--from=verl", "data.seed=1"])
    assert ended.value.code == 2 and "--from" in capsys.readouterr().err


# ---- units


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [
                "verl",
                "data.train_batch_size=512",
                ACTOR + "ppo_mini_batch_size=32",
                ACTOR + "optim.lr_warmup_steps=10",
            ],
            {"actor.lr_warmup_steps": 160},
        ),
        (
            [
                "verl",
                "data.train_batch_size=512",
                ACTOR + "ppo_mini_batch_size=128",
                ACTOR + "ppo_epochs=3",
                ACTOR + "optim.lr_warmup_steps=10",
            ],
            {"actor.lr_warmup_steps": 120},
        ),
        (
            ["verl", ACTOR + "optim.lr_warmup_steps=0", ACTOR + "optim.lr_warmup_steps_ratio=0.1"],
            {"actor.lr_warmup_steps": None, "actor.lr_warmup_ratio": 0.1},
        ),
        (["verl", "critic.optim.lr_warmup_steps_ratio=0.2"], {"critic.lr_warmup_ratio": 0.2}),
        (
            ["verl", "critic.optim.lr_warmup_steps=5", "trainer.total_training_steps=50"],
            {"critic.lr_warmup_ratio": 0.1},
        ),
        (
            ["verl", ACTOR + "optim.min_lr=1e-7", ACTOR + "optim.lr_decay_style=cosine"],
            {"actor.min_lr_ratio": 0.1, "actor.lr_scheduler": "cosine_with_min_lr"},
        ),
        (
            ["verl", "trainer.save_freq=20", "trainer.test_freq=5"],
            {"ckpt.save_steps": 20, "eval.steps": 5},
        ),
        (
            [
                "trl",
                "--save_steps=100",
                "--logging_steps=10",
                "--gradient_accumulation_steps=2",
                "--steps_per_generation=8",
                "--warmup_steps=20",
            ],
            {"ckpt.save_steps": 25, "logger.logging_steps": 2, "actor.lr_warmup_steps": 20},
        ),
        (["trl", "--save_steps=100", "--num_iterations=2"], {"ckpt.save_steps": 50}),
        (
            ["trl", "--save_steps=100", "--save_strategy=epoch", "--logging_steps=1"],
            {"ckpt.save_steps": None, "logger.logging_steps": 1},
        ),
        (
            ["trl", "--gradient_accumulation_steps=8", "--steps_per_generation=2"],
            {"rollout.batch_size": 8, "train.batch_size": 64},
        ),
        (["trl", "--generation_batch_size=64"], {"rollout.batch_size": 8, "train.batch_size": 8}),
        (["trl", "--max_prompt_length=256", "--max_completion_length=100"], {"data.max_len": 356}),
    ],
)
def test_steps_batches_and_lengths_are_in_our_units(words, expected):
    ours = translated(*words)
    assert {name: ours.get(name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["trl", "--loss_type=cispo", "--epsilon_high=5.0"], "actor.eps_clip_low_high", [1.0, 4.0]),
        (["trl", "--loss_type=cispo"], "actor.eps_clip_low_high", [1.0, 0.0]),
        (["trl", "--use_peft"], "ds.lora.target_modules", ["q_proj", "v_proj"]),
        (
            ["trl", "--use_peft", "--lora_target_modules=all-linear"],
            "ds.lora.target_modules",
            "all-linear",
        ),
        (["trl", "--scale_rewards=no"], "algo.grpo.normalize_std", False),
        (
            [
                "trl",
                "--use_vllm=true",
                "--vllm_importance_sampling_mode=token_truncate",
                "--vllm_importance_sampling_cap=2.0",
            ],
            "algo.advantage.is_correction_threshold",
            [0.0, 2.0],
        ),
        (["trl", "--top_entropy_quantile=0.3"], "algo.high_entropy_tokens.top_rho", 0.3),
        # which a run refuses
        (["verl", "algorithm.adv_estimator=remax"], "algo.advantage.estimator", "remax"),
        (
            ["verl", OVERLONG + "enable=True", OVERLONG + "len=512"],
            "reward.overlong_buffer_len",
            512,
        ),
        (["verl", ACTOR + "optim.clip_grad=0.5"], "actor.max_norm", 0.5),
        (["verl", ACTOR + "grad_clip=0.3"], "actor.max_norm", 0.3),
        (["verl", "actor_rollout_ref.model.lora.rank=8"], "ds.lora.rank", 8),
        (["verl", "actor_rollout_ref.model.lora.rank=8"], "ds.lora.alpha", 32),
    ],
)
def test_what_a_method_of_theirs_means_here(words, name, value):
    assert translated(*words)[name] == value


@pytest.mark.parametrize(
    "estimator", ["rloo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_rewards_of_verl_are_not_clipped(estimator):
    ours = translated("verl", f"algorithm.adv_estimator={estimator}")
    assert ours[f"algo.{ours['algo.advantage.estimator']}.reward_clip"] is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["verl", "algorithm.adv_estimator=opo"],
            "# algorithm.adv_estimator: this estimator with this loss_mode is not",
        ),
        (
            ["verl", "algorithm.gama=0.9", "data.seed=1"],
            "# algorithm.gama 0.9: not here; there is algorithm.gamma",
        ),
        (
            ["verl", ACTOR + "clip_ratio=0.1"],
            "clip_ratio: verl reads it where clip_ratio_low or clip_ratio_high is null",
        ),
        (
            ["verl", "data.train_files=['a,b.parquet']"],
            "# data.train_files: data.prompt_dataset separates paths by commas",
        ),
        (
            ["verl", "algorithm.kl_ctrl.kl_coef=0.005"],
            "# algorithm.kl_ctrl.kl_coef: no effect without algorithm.use_kl",
        ),
        (
            ["verl", ACTOR + "kl_loss_coef=0.1"],
            "kl_loss_coef: no effect without actor_rollout_ref.actor.use_kl_loss",
        ),
        (
            ["trl", "--scale_rewards=grup"],
            "# scale_rewards as given: TRL takes group, batch or none: group is set",
        ),
        (["trl", "--use_peft"], "# lora_target_modules: peft then adapts q_proj and v_proj"),
        (["trl", "--loss_type=cispo"], "# loss_type cispo: TRL caps the ratio at epsilon_high"),
        (["trl", "--save_strategy=epoch"], "# save_steps: TRL counts updates"),
        (
            ["verl", ACTOR + "optim.lr_warmup_steps=10"],
            "optim.lr_warmup_steps: verl's schedule steps once per batch",
        ),
        (
            ["verl", "critic.optim.lr_warmup_steps=10"],
            "critic.optim.lr_warmup_steps: the critic's warm-up is a share",
        ),
        (
            ["verl", "trainer.total_training_steps=10"],
            "trainer.total_training_steps: verl stops after so many batches",
        ),
        (
            ["verl", "data.gen_batch_size=10"],
            "# data.gen_batch_size 10: of groups that filter_groups drops",
        ),
        (
            ["verl", "critic.ppo_mini_batch_size=10"],
            "# critic.ppo_mini_batch_size 10: the critic has the policy's",
        ),
        (["trl", "--max_steps=10"], "# max_steps: TRL stops after so many updates"),
        (["trl", "--save_steps=10"], "# save_steps: TRL counts updates"),
        (
            ["trl", "--eval_steps=10"],
            "# eval_steps 10: see eval.*; eval.steps counts batches of rollouts",
        ),
        (["trl", "--max_prompt_length=10"], "# max_prompt_length: of earlier releases"),
        (
            [
                "trl",
                "--num_iterations=2",
                "--gradient_accumulation_steps=8",
                "--steps_per_generation=2",
            ],
            "# generation_batch_size: an update of TRL then takes samples several times",
        ),
        (
            ["trl", "--gradient_accumulation_steps=4", "--steps_per_generation=6"],
            "# steps_per_generation: a batch of rollouts is no whole number of updates",
        ),
    ],
)
def test_units_that_are_not_ours_have_a_line(words, line):
    assert line in translate(words)


NAMES = {project: sorted(_table(project)["options"]) for project in PROJECTS}


@given(data=st.data())
def test_nothing_that_is_given_is_lost(data):
    """Every option with its default says what no option does; every other word has a line."""
    project = data.draw(st.sampled_from(PROJECTS))
    name = data.draw(st.sampled_from(NAMES[project]))
    default = _table(project)["options"][name][1]
    spelled = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
    form = {"verl": "{}={}", "trl": "--{}={}"}[project].format
    base = [form(*one) for one in ({"verl": ("trainer.nnodes", 1), "trl": ("seed", 42)}[project],)]
    unknown = data.draw(st.from_regex(r"zz[a-z]{0,5}", fullmatch=True))
    text = translate([project, *base, form(name, spelled), form(unknown, 3)])
    without = translate([project, *base])
    assert yaml.safe_load(text) == yaml.safe_load(without), name
    assert f"# {unknown} 3: " in text


def test_the_command_runs_as_a_script_of_theirs_starts_it(tmp_path):
    """Whole: bash, the command, its output as YAML."""
    command = f"{sys.executable} -m openrlhf_ext plan --from verl"
    script = BRANCHES.replace("echo ", ": ").replace(STARTS["verl"], command)
    (tmp_path / "run.sh").write_text(script)
    done = subprocess.run(["bash", tmp_path / "run.sh"], capture_output=True, text=True, check=True)
    assert leaves(yaml.safe_load(done.stdout))["rollout.batch_size"] == 128
