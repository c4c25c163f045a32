"""The tables of ``plan --from`` against the option lists of verl and TRL, and published scripts
that then dry-run."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from openrlhf_ext.cli.plan import main as plan
from openrlhf_ext.cli.train_ppo_ray import main as train
from openrlhf_ext.config import option_table
from openrlhf_ext.tools.plan import translate
from tests.conformance.packages import unpacked
from tests.models import make_tiny_policy
from tests.tools.plan.test_translate import words_of_bash

pytestmark = pytest.mark.conformance
EARLIER = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.",
    "reward.reward_kwargs.",
    "warmup_ratio",
    "max_prompt_length",
    "gpus",
    "lr_scheduler_kwargs.",
)
"""Names of verl's DAPO scripts that its lists do not have, of transformers before 5 and of earlier
TRL; the launcher's GPUs, and keys of a map."""


def table(project: str) -> dict[str, Any]:
    return yaml.safe_load(Path(translate.__file__).with_name(f"{project}.yaml").read_text())


@pytest.fixture(scope="module")
def of_verl() -> dict[str, Any]:
    """Names and defaults of both its trainers; a reference to another option is None."""
    folder = unpacked("verl==0.9.1") / "verl/trainer/config"
    found: dict[str, Any] = {}
    for name in ("_generated_ppo_megatron_trainer.yaml", "_generated_ppo_trainer.yaml"):
        found |= {
            name: None if str(value).startswith("${") else value
            for name, value in leaves(yaml.safe_load((folder / name).read_text()))
            if not name.endswith("_target_")
        }
    return found


def leaves(tree: Any, above: str = "") -> Any:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@pytest.fixture(scope="module")
def of_trl() -> dict[str, Any]:
    """Names and defaults of GRPOConfig, of the TrainingArguments below it, and of what ``trl grpo``
    reads beside it."""
    folder = unpacked("trl==1.16.0") / "trl"
    found = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}
    for file in (
        "trainer/base_config.py",
        "trainer/grpo_config.py",
        "trainer/model_config.py",
        "scripts/utils.py",
    ):
        classes = [
            node
            for node in ast.parse((folder / file).read_text()).body
            if isinstance(node, ast.ClassDef)
        ]
        for node in (
            one for each in classes for one in each.body if isinstance(one, ast.AnnAssign)
        ):
            given = {word.arg: word.value for word in getattr(node.value, "keywords", [])}
            default = given.get("default", given.get("default_factory"))
            is_plain = isinstance(default, (ast.Constant, ast.UnaryOp))
            found[node.target.id] = ast.literal_eval(default) if is_plain else None
    return found


@pytest.mark.parametrize("project", translate.PROJECTS)
def test_every_name_and_default_of_a_table_is_theirs(project, request):
    theirs = request.getfixturevalue(f"of_{project}")
    for name, (_, default) in table(project)["options"].items():
        if name.startswith(EARLIER):
            continue
        assert name in theirs, name
        if default is not None and theirs[name] is not None:
            assert theirs[name] == default, name


@pytest.mark.parametrize("project", translate.PROJECTS)
def test_every_option_of_a_table_is_ours(project):
    found = table(project)
    names = [ours for ours, _ in found["options"].values() if ours is not None]
    names += [rule for rule in found["rules"] if "{" not in rule]
    assert [name for name in names if option_table().find(name) is None] == []


@pytest.mark.parametrize("project", translate.PROJECTS)
def test_every_option_of_theirs_is_translated_or_has_a_reason(project, request):
    found = table(project)
    theirs = request.getfixturevalue(f"of_{project}")
    known = [*found["lines"], *found["options"], *found["nothing"]]
    assert [
        name for name in theirs if not any(fnmatch.fnmatchcase(name, one) for one in known)
    ] == []


def test_a_whole_configuration_of_verl_has_a_line_for_each_option(of_verl, tmp_path, capsys):
    file = unpacked("verl==0.9.1") / "verl/trainer/config/_generated_ppo_trainer.yaml"
    assert plan(["--from", "verl", str(file)]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("# ")]
    given = dict(translate._flat(yaml.safe_load(file.read_text())))
    options = table("verl")["options"]
    silent = [
        name
        for name in given
        if name not in options and not any(line.startswith(f"# {name} ") for line in lines)
    ]
    assert silent == [] and yaml.safe_load(printed)["algo"]["advantage"]["estimator"] == "gae"


def test_a_name_that_is_close_to_one_says_so(capsys):
    assert plan(["--from", "trl", "--learning_rte", "1e-5", "--top_k", "50"]) == 0
    printed = capsys.readouterr().out
    assert (
        "# learning_rte 1e-05: TRL 1.16.0 has no such option; there is learning_rate\n" in printed
    )
    assert "# top_k 50: only all tokens are here\n" in printed
    assert plan(["--from", "trl", "--data_seed=3", "--zzz", "1"]) == 0
    printed = capsys.readouterr().out
    assert (
        "# data_seed 3: not here\n# " in printed
        and "# zzz 1: TRL 1.16.0 has no such option\n" in printed
    )
    assert plan(["--from", "verl", "zzz.x=1", "data.seed=3"]) == 0
    assert "# zzz.x 1: verl 0.9.1 has no such option\n" in capsys.readouterr().out


# ---- what an option becomes


def translated(capsys: Any, *words: str) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert plan(["--from", *words]) == 0
    printed = capsys.readouterr().out
    return dict(leaves(yaml.safe_load(printed))), printed


ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            {
                "algo.advantage.estimator": "gae",
                "critic.value_clip": 0.5,
                "actor.dual_clip": 3.0,
                "actor.eps_clip_low_high": [0.2, 0.2],
                "algo.kl.init_coef": 0,
                "actor.adam.weight_decay": 0.01,
            },
        ),
        (
            ["algorithm.adv_estimator=grpo", ACTOR + "use_kl_loss=True"],
            {
                "algo.kl.use_loss": True,
                "algo.kl.init_coef": 0.001,
                "algo.kl.estimator": "k3",
                "critic.value_clip": None,
            },
        ),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"],
            {
                "algo.kl.use_loss": None,
                "algo.kl.estimator": "k1",
                "algo.kl.target": 0.1,
                "algo.kl.horizon": 10000,
            },
        ),
        (
            [
                "algorithm.adv_estimator=grpo",
                "algorithm.norm_adv_by_std_in_grpo=False",
                ACTOR + "loss_agg_mode=seq-mean-token-sum-norm",
            ],
            {
                "algo.grpo.normalize_std": False,
                "algo.grpo.agg": "seq-mean-token-sum-norm",
                "algo.grpo.l_norm": 512,
                "actor.loss_agg_mode": None,
            },
        ),
        (
            [ACTOR + "clip_ratio=0.1", ACTOR + "clip_ratio_low=null"],
            {"actor.eps_clip_low_high": [0.1, 0.2]},
        ),
        (
            ["algorithm.adv_estimator=grpo", ACTOR + "policy_loss.loss_mode=kl_cov"],
            {
                "algo.kl_cov.ppo_kl_coef": 0.1,
                "algo.kl_cov.cov_ratio": 0.0002,
                "actor.eps_clip_low_high": None,
                "actor.dual_clip": None,
            },
        ),
        (
            [
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            ],
            {
                "algo.advantage.is_correction_mode": "mask",
                "algo.advantage.is_correction_threshold": [0.5, 5.0],
            },
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            {
                "algo.advantage.is_correction_mode": "clip",
                "algo.advantage.is_correction_threshold": [0.0, 2.0],
            },
        ),
        (["trainer.critic_warmup=5"], {"critic.freezing_steps": 3}),
        (
            [
                "data.train_files=[a.parquet,b.parquet]",
                "data.train_batch_size=64",
                ACTOR + "ppo_mini_batch_size=16",
                "actor_rollout_ref.rollout.n=8",
            ],
            {
                "data.prompt_dataset": "a.parquet,b.parquet",
                "rollout.batch_size": 64,
                "train.batch_size": 128,
                "rollout.n_samples_per_prompt": 8,
            },
        ),
        (
            ["trainer.test_freq=5", "data.val_files=t.parquet"],
            {
                "eval.steps": 5,
                "eval.dataset": "t.parquet",
                "eval.temperature": 0,
                "eval.n_samples_per_prompt": 1,
            },
        ),
    ],
)
def test_verls_options_and_defaults_are_ours(words, expected, capsys):
    ours, _ = translated(capsys, "verl", "trainer.nnodes=1", *words)
    assert {name: ours.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            {
                "actor.lr_scheduler": "linear",
                "actor.loss_agg_mode": "token-mean",
                "algo.grpo.adv_eps": 1e-4,
                "algo.kl.init_coef": 0.0,
                "train.num_episodes": 3,
                "algo.advantage.is_correction_level": "off",
            },
        ),
        (
            ["--beta=0.04"],
            {
                "algo.kl.estimator": "k3",
                "algo.kl.unbiased_gradient": True,
                "algo.kl.use_loss": True,
            },
        ),
        (
            ["--loss_type=dr_grpo", "--scale_rewards=none", "--max_completion_length=100"],
            {
                "algo.grpo.l_norm": 100,
                "algo.grpo.agg": "seq-mean-token-sum-norm",
                "algo.grpo.normalize_std": False,
                "actor.loss_agg_mode": None,
            },
        ),
        (
            [
                "--importance_sampling_level=sequence",
                "--loss_type=grpo",
                "--epsilon=3e-4",
                "--epsilon_high=4e-4",
            ],
            {
                "algo.advantage.estimator": "gspo",
                "actor.eps_clip_low_high": [3e-4, 4e-4],
                "actor.loss_agg_mode": None,
            },
        ),
        (
            ["--use_vllm=true", "--vllm_importance_sampling_mode=token_truncate"],
            {
                "algo.advantage.is_correction_mode": "clip",
                "algo.advantage.is_correction_threshold": [0.0, 3.0],
            },
        ),
        (
            [
                "--per_device_train_batch_size=4",
                "--gradient_accumulation_steps=2",
                "--steps_per_generation=8",
            ],
            {"rollout.batch_size": 4, "train.batch_size": 8},
        ),
        (
            ["--delta=4", "--mask_truncated_completions=true"],
            {"actor.dual_clip": 4, "algo.grpo.mask_truncated": True},
        ),
        (
            ["--use_peft=true", "--lora_r=1"],
            {"ds.lora.rank": 1, "ds.lora.alpha": 32, "ds.lora.dropout": 0.05},
        ),
    ],
)
def test_trls_options_and_defaults_are_ours(words, expected, capsys):
    ours, _ = translated(capsys, "trl", "--seed=42", *words)
    assert {name: ours.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["verl", ACTOR + "policy_loss.loss_mode=dppo_tv"],
            "policy_loss.loss_mode: this loss is not here",
        ),
        (["verl", "algorithm.adv_estimator=remax"], "algorithm.adv_estimator: this estimator"),
        (
            ["verl", "algorithm.rollout_correction.rollout_is=sequence"],
            "rollout_is: a product of ratios is not here",
        ),
        (
            ["verl", "reward.custom_reward_function.name=mine"],
            "custom_reward_function.name: a file with several functions",
        ),
        (["trl", "--scale_rewards=batch"], "scale_rewards: the std of the batch is not here"),
        (
            ["trl", "--use_vllm=true"],
            "vllm_importance_sampling_mode: a product of ratios is not here",
        ),
        (["trl", "--loss_type=vespo"], "loss_type: this loss is not here"),
    ],
)
def test_what_means_something_else_has_a_line(words, line, capsys):
    assert line in translated(capsys, *words)[1]


# ---- published scripts

# examples/grpo_trainer/run_qwen3-8b.sh, examples/ppo_trainer/run_deepseek7b_llm.sh and
# examples/gmpo_trainer/ test_dapo_7b_math.sh of verl b178a3cd5: their options, in the shell's forms
# that they use
QWEN3 = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \\
    data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen3_8b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
PPO = """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \\
    data.filter_overlong_prompts=True actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 critic.optim.lr=1e-5 critic.model.path=$MODEL \\
    critic.ppo_micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=1 trainer.total_epochs=15 $@
"""
DAPO = """
adv_estimator=grpo
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
NNODES=${NNODES:-8}
TRAIN_FILE=${TRAIN_FILE:-"${DATA}/train.parquet"}
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 2))
# the loss of the script
loss_mode=geo_mean
python3 -m verl.trainer.main_ppo \\
    data.train_files="${TRAIN_FILE}" data.prompt_key=prompt data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.train_batch_size=512 actor_rollout_ref.rollout.n=16 \\
    algorithm.adv_estimator=${adv_estimator} \\
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} actor_rollout_ref.actor.clip_ratio_low=0.4 \\
    actor_rollout_ref.actor.clip_ratio_high=0.4 \\
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \\
    actor_rollout_ref.model.path="${MODEL}" actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.top_k=-1 reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4)) \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \\
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" trainer.total_epochs=1
"""
# TRL f2cd57710: examples/scripts/gspo.py, docs/source/lora_without_regret.md (GRPO),
# docs/source/paper_index.md (DAPO)
GSPO = """
learning_rate: 1e-5
max_completion_length: 1024
use_peft: true
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 8
num_generations: 8
importance_sampling_level: sequence
epsilon: 3e-4
epsilon_high: 4e-4
beta: 0.0
loss_type: grpo
gradient_accumulation_steps: 2
steps_per_generation: 8
log_completions: true
"""
LORA = """
learning_rate: 1.0e-6
lr_scheduler_type: cosine
warmup_steps: 0.0
max_grad_norm: 1.0
beta: 0.0
max_completion_length: 4096
num_generations: 16
generation_batch_size: 16
gradient_accumulation_steps: 8
per_device_train_batch_size: 2
num_train_epochs: 1
use_peft: true
lora_r: 1
lora_alpha: 32
lora_dropout: 0.0
lora_target_modules: all-linear
vllm_mode: colocate
save_strategy: steps
"""
DAPO_OF_TRL = """
mask_truncated_completions: true
loss_type: dapo
epsilon_high: 0.28
epsilon: 0.2
per_device_train_batch_size: 512
num_generations: 16
max_completion_length: 20480
beta: 0.0
"""
VERLS_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return int(ground_truth) / 2
"""
TRLS_REWARD = (
    "def accuracy(completions, solution, **kwargs):\n    return [int(s) / 4 for s in solution]\n"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data in both projects' forms, and both rewards."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("task")
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    make_tiny_policy(folder / "model", chat_template=template)
    config = json.loads((folder / "model/config.json").read_text()) | {
        "max_position_embeddings": 32768
    }
    (folder / "model/config.json").write_text(json.dumps(config))
    verl = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{i}+1"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(2048)
    ]
    for name in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), folder / f"{name}.parquet")
    trl = [{"prompt": f"{i}+1", "solution": str(i + 1)} for i in range(2048)]
    (folder / "trl.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trl))
    (folder / "verl_reward.py").write_text(VERLS_REWARD)
    (folder / "trl_reward.py").write_text(TRLS_REWARD)
    return folder


def dry_run(capsys: Any, tmp_path: Path, source: list[str], *words: str) -> str:
    capsys.readouterr()
    assert plan(["--from", *source]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    words = (
        "--config",
        str(tmp_path / "run.yaml"),
        "--megatron.layout",
        "given",
        "--dry_run",
        *words,
    )
    status = train(list(words))
    printed = capsys.readouterr()
    assert status == 0, printed.err + printed.out
    return printed.out


@pytest.mark.parametrize("script", [QWEN3, PPO, DAPO], ids=["grpo", "ppo", "dapo"])
def test_published_scripts_of_verl_dry_run(script, task, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DATA", str(task))
    monkeypatch.setenv("MODEL", str(task / "model"))
    reward = f"reward.custom_reward_function.path={task / 'verl_reward.py'}"
    words = [*words_of_bash(script, tmp_path), reward]
    said = dry_run(capsys, tmp_path, words, "--ckpt.output_dir", str(tmp_path / "out"))
    assert "made as the answer to the first prompt: reward 0.5" in said, (
        "ground_truth of the column reward_model"
    )


@pytest.mark.parametrize("config", [GSPO, LORA, DAPO_OF_TRL], ids=["gspo", "lora", "dapo"])
def test_published_configurations_of_trl_dry_run(config, task, tmp_path, capsys):
    (tmp_path / "trl.yaml").write_text(config)
    given = ["--model_name_or_path", str(task / "model"), "--dataset_name", str(task / "trl.jsonl")]
    more = ("--data.label_key", "solution", "--reward.remote_url", str(task / "trl_reward.py"))
    out = ("--ckpt.output_dir", str(tmp_path / "out"))
    said = dry_run(capsys, tmp_path, ["trl", str(tmp_path / "trl.yaml"), *given], *more, *out)
    assert "made as the answer to the first prompt: reward 0.25" in said
