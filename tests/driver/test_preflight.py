"""What is refused before Ray starts because algorithms, models and reward files say so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_ext.algorithms import registry
from openrlhf_ext.cli import train_ppo_ray
from openrlhf_ext.config import ConfigError, build_config, load_config
from openrlhf_ext.config.estimator import algorithm_options, engine_entropies, old_logprobs
from openrlhf_ext.driver import job, preflight
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.preflight import check_files, checkpoint_violations, findings
from openrlhf_ext.driver.settings import build_algorithm, probe_tolerance
from openrlhf_ext.driver.trials import try_user_code
from openrlhf_ext.megatron.model.shape import read_model_shape, read_value_shape
from openrlhf_ext.run.preflight import unseen_inputs
from tests.e2e.estimators import OWN_METHOD
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task.make(tmp_path_factory.mktemp("run"))


def load(task: Task, *words: str):
    # the default: not every method here has a pass that it is the size of
    return load_config(
        [*task.options("out", rollout__micro_batch_size=1), *words], more_rules=findings
    )


def problems(task: Task, *words: str) -> list[str]:
    try:
        load(task, *words)
    except ConfigError as error:
        return [violation.message for violation in error.violations]
    return []


@pytest.mark.parametrize(
    ("estimator", "in_reward", "in_loss"),
    [
        ("grpo", None, None),
        (
            "gtpo_entropy",
            r"only in the loss: .*; add algo\.kl\.use_loss, or set algo\.kl\.init_coef 0",
            None,
        ),
        ("gspo", None, r"only in the reward: .*use_loss true; leave out algo\.kl\.use_loss"),
        (
            "grpo_s",
            r"does not support a KL penalty: .*; set algo\.kl\.init_coef 0",
            "does not support",
        ),
    ],
)
def test_a_kl_penalty_acts_where_the_estimator_defines_one(task, estimator, in_reward, in_loss):
    words = [
        "--algo.advantage.estimator",
        estimator,
        "--algo.kl.init_coef",
        "0.1",
        "--algo.kl.estimator",
        "k3",
    ]
    for more, wanted in (([], in_reward), (["--algo.kl.use_loss"], in_loss)):
        found = problems(task, *words, *more)
        assert len(found) == (wanted is not None), found
        assert wanted is None or re.search(wanted, found[0]), found


def test_an_algorithm_of_the_users_own_is_checked_like_any_other(task, tmp_path):
    custom, file = ["--algo.advantage.estimator", "custom"], tmp_path / "own.py"
    (missing,) = problems(task, *custom)
    assert missing.startswith("algo.module_path is required with algo.advantage.estimator custom")
    custom += ["--algo.module_path", str(file)]
    assert problems(task, *custom) == [f"algo.module_path must be an existing .py file: got {file}"]
    file.write_text("raise KeyError('x')")
    assert problems(task, *custom) == [
        f'algo.module_path: {file} cannot be imported:\n  File "{file}", line 1, in <module>\n'
        "    raise KeyError('x')\nKeyError: 'x'"
    ]
    file.write_text(OWN_METHOD.replace("reward_sign_e2e", "reward_sign_preflight"))
    (unknown,) = problems(task, *custom, "--algo.custom.strenght", "2")
    assert unknown.startswith("algo.custom: unknown option 'strenght'; did you mean 'strength'?")
    (wrong,) = problems(task, *custom, "--algo.custom.strength", "many")
    assert wrong == "algo.custom.strength: expected number, got many (command line)"
    (foreign,) = load(task, *custom, "--algo.custom.alpha1", "2").warnings
    assert foreign.startswith("algo.custom.alpha1 has no effect: got 2, and")
    one = ["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8"]
    config = load(task, *custom, *one, "--algo.custom.strength", "2")
    assert algorithm_options(config) == ("reward_sign_preflight", {"strength": 2}, None)
    assert build_algorithm(config).options.strength == 2.0
    assert "algo.module_path has no effect" in " ".join(
        load(task, "--algo.module_path", str(file)).warnings
    )


def test_violations_of_every_kind_are_in_one_report(task):
    words = [
        "--train.batch_size",
        "30",
        "--algo.advantage.estimator",
        "clip_cov",
        "--algo.clip_cov.foo",
        "1",
        "--algo.clip_cov.cov_ratio",
        "-1",
        "--algo.clip_cov.kl",
        "3",
        "--algo.clip_cov.cov_lb",
        "x",
        "--algo.kl.init_coef",
        "0.1",
        "--algo.kl.use_loss",
        "--train.sead",
        "1",
    ]
    starts = [
        "unknown option train.sead",
        "train.batch_size (samples) must be a multiple of",
        "train.batch_size (samples) must divide",
        "algo.clip_cov.kl is not an option",
        "algo.clip_cov.cov_ratio: expected number >= 0 and <= 1, got -1 (command line)",
        "algo.clip_cov.cov_lb: expected",
        "algo.clip_cov: unknown option 'foo'",
        "algo.advantage.estimator clip_cov supports a KL penalty",
    ]
    found = problems(task, *words)
    assert len(found) == len(starts), found
    for start, message in zip(starts, found, strict=True):
        assert message.startswith(start), message


@pytest.mark.parametrize("estimator", ["clip_cov", "kl_cov"])
def test_estimators_that_look_at_the_current_policy_may_update_several_times(task, estimator):
    assert (
        problems(
            task,
            "--algo.advantage.estimator",
            estimator,
            "--train.batch_size",
            "16",
            "--train.max_epochs",
            "2",
        )
        == []
    )


def test_a_constant_length_divisor_needs_a_length(task):
    words = [
        "--algo.advantage.estimator",
        "dr_grpo",
        "--rollout.max_new_tokens",
        "null",
        "--algo.dr_grpo.agg",
        "seq-mean-token-sum-norm",
    ]
    (message,) = problems(task, *words)
    assert message.startswith("algo.dr_grpo: l_norm is required")
    assert problems(task, *words, "--algo.dr_grpo.l_norm", "64") == []


def test_a_penalty_made_of_flags_is_complained_about_once(task):
    (message,) = problems(task, "--reward.overlong_buffer_len", "16")  # of responses of 12 tokens
    assert message.startswith("reward.overlong_buffer_len must not exceed")


@pytest.mark.parametrize(
    ("estimator", "words", "flag"),
    [
        ("gtpo_conflict", ["--actor.dual_clip", "3"], "actor.dual_clip"),
        ("gspo", ["--actor.loss_agg_mode", "seq-mean-token-mean"], "actor.loss_agg_mode"),
        (
            "gtpo_conflict",
            ["--reward.stop_properly_penalty_coef", "0.5"],
            "reward.stop_properly_penalty_coef",
        ),
    ],
)
def test_a_flag_for_other_estimators_is_warned_about_and_left_out(
    task, caplog, estimator, words, flag
):
    config = load(task, "--algo.advantage.estimator", estimator, *words)
    (warning,) = config.warnings
    assert warning.startswith(
        f"{flag} has no effect: got {words[1]}, and algo.advantage.estimator {estimator} does not"
    )
    assert algorithm_options(config)[1] == {} and not caplog.records


def test_where_old_log_probs_come_from(task):
    def source(*words: str) -> tuple[str, str]:
        return old_logprobs(load(task, *words))

    one_update = (
        "--train.batch_size",
        "8",
        "--rollout.batch_size",
        "2",
        "--rollout.n_samples_per_prompt",
        "4",
    )
    grpo = (*one_update, "--algo.advantage.estimator", "grpo")
    assert source(*grpo)[0] == source(*grpo, "--train.max_staleness", "1")[0] == "update"
    assert source(*grpo, "--algo.old_logprobs", "policy")[0] == "policy"
    for words, why in (
        ((*grpo, "--train.max_epochs", "2"), "several updates per batch"),
        ((*grpo, "--rollout.batch_size", "4"), "several updates per batch"),
        ((*grpo, "--train.drift_check"), "train.drift_check compares"),
        (
            (*grpo, "--algo.advantage.is_correction_level", "seq"),
            "the importance correction is of whole completions",
        ),
        (
            (*one_update, "--algo.advantage.estimator", "gtpo_entropy"),
            "gtpo_entropy shapes by entropies",
        ),
        (
            (*one_update, "--algo.advantage.estimator", "kl_cov"),
            "kl_cov reads old log-probs before the update",
        ),
        ((*grpo, "--algo.kl.init_coef", "0.1"), "the KL penalty is in the reward"),
    ):
        found, reason = source(*words)
        assert found == "policy" and why in reason, words
    assert old_logprobs(of_a_mixture(load(task, *grpo))) == (
        "policy",
        "the experts of that pass are replayed",
    )


def of_a_mixture(config):
    """The run with the experts of its pass of old log-probs replayed; the task's model has none."""
    return config.model_copy(
        update={"train": config.train.model_copy(update={"routing_replay": "policy"})}
    )


def test_what_log_probs_of_the_engines_cannot_be(task):
    engine = ("--algo.old_logprobs", "engine", "--algo.advantage.estimator")
    assert (
        problems(task, *engine, "grpo", "--train.max_staleness", "2", "--train.max_epochs", "2")
        == []
    )
    for words, why in (
        (
            ("grpo", "--rollout.top_p", "0.9"),
            "rollout.top_p 0.9: they come from the truncated distribution",
        ),
        (
            ("grpo_s",),
            "algo.entropies policy: grpo_s needs a forward pass of the policy for its entropies",
        ),
        (
            ("grpo", "--algo.kl.init_coef", "0.1"),
            "a KL penalty in the reward uses the policy's log-probs",
        ),
        (("clip_cov",), "clip_cov: it chooses tokens by the policy's log-probs"),
        (
            ("grpo", "--train.drift_check"),
            "train.drift_check true: it compares the policy's log-probs",
        ),
        (
            ("grpo", "--algo.advantage.is_correction_level", "token"),
            "is_correction_level token: ratios already use the engines' log-probs",
        ),
    ):
        (message,) = problems(task, *engine, *words)
        assert (
            message.startswith("algo.old_logprobs engine does not work with ") and why in message
        ), words
        assert message.endswith("use algo.old_logprobs auto")
    (replays,) = preflight.old_logprob_violations(of_a_mixture(load(task, *engine, "grpo")))
    assert "train.routing_replay policy: it replays the policy's forward pass" in replays.message


def test_the_probe_of_a_mixture_in_bf16_allows_for_routers_that_choose_others(tmp_path):
    task, ep = (
        Task.make(tmp_path),
        ("--megatron.tensor_parallel_size", "1", "--megatron.expert_parallel_size", "2"),
    )
    bf16 = ("--megatron.param_dtype", "bf16")
    assert probe_tolerance(load(task, *bf16)) == 0.1
    shutil.rmtree(tmp_path / "policy")
    make_tiny_policy(tmp_path / "policy", "qwen3_moe", head_dim=32)
    assert (
        probe_tolerance(load(task, *ep, *bf16)) == 0.4 and probe_tolerance(load(task, *ep)) == 1e-4
    )
    assert probe_tolerance(load(task, *ep, *bf16, "--weight_sync.probe_tolerance", "0.2")) == 0.2


def test_entropies_of_the_engines(task):
    engine = ("--algo.entropies", "engine", "--algo.advantage.estimator")
    one_update = (
        "--train.batch_size",
        "8",
        "--rollout.batch_size",
        "2",
        "--rollout.n_samples_per_prompt",
        "4",
    )
    config = load(task, *one_update, *engine, "gtpo_entropy")
    assert engine_entropies(config) and old_logprobs(config)[0] == "update"
    assert problems(task, *engine, "gtpo_entropy", "--algo.old_logprobs", "engine") == []
    (message,) = problems(task, *engine, "grpo_s", "--rollout.top_p", "0.9")
    assert message.startswith(
        "algo.entropies engine does not work with rollout.top_p 0.9: they come from the truncated"
    )
    (warning,) = load(task, *engine, "grpo").warnings
    assert warning.startswith(
        "algo.entropies has no effect: got engine, and algo.advantage.estimator grpo uses no"
    )


def test_one_ratio_per_response_is_not_silently_left_out(task):
    words = ["--actor.policy_loss_type", "gspo"]
    (message,) = problems(task, *words)
    assert message.startswith("actor.policy_loss_type gspo is for OpenRLHF's own estimators: got ")
    assert message.endswith("use algo.advantage.estimator gspo, group_norm or reinforce_baseline")
    assert problems(task, *words, "--algo.advantage.estimator", "reinforce_baseline") == []


def test_an_option_of_other_estimators_is_warned_about_with_its_owner_and_left_out(task, caplog):
    config = load(task, "--algo.grpo.alpha1", "5")
    (warning,) = config.warnings
    assert warning == (
        "algo.grpo.alpha1 has no effect: got 5, and algo.advantage.estimator grpo does not read "
        "it: it is an option of gtpo_entropy; leave it out"
    )
    build_algorithm(config)
    assert algorithm_options(config)[1] == {} and not caplog.records
    assert load(task, "--algo.grpo.alpha1", "null").warnings == ()


def test_a_length_penalty_of_every_estimator_is_read_as_the_estimators_own(task):
    """No warning that its gamma does nothing; the estimator that has none says so."""
    grop = ["--reward.length_penalty.kind", "grop", "--reward.length_penalty.grop_gamma1", "0.7"]
    assert load(task, "--algo.advantage.estimator", "dapo", *grop).warnings == ()
    warnings = load(task, "--algo.advantage.estimator", "gtpo_conflict", *grop).warnings
    assert [w for w in warnings if "reward.length_penalty.kind has no effect" in w], warnings


def test_what_has_no_effect_in_an_estimator_is_said_once(task, caplog):
    config = load(task, "--algo.advantage.estimator", "kl_cov", "--algo.kl_cov.dual_clip", "3")
    (warning,) = config.warnings
    assert (
        warning
        == "algo.kl_cov: dual_clip has no effect: got 3, and kl_cov clips nothing; leave it out"
    )
    build_algorithm(config)
    assert not caplog.records


def test_values_of_an_estimator_that_make_no_sense_are_refused_with_their_place(task, tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text(
        "algo:\n  gtpo_entropy:\n    alpha1: -1\n    length_penalty: {kind: dapo, l_max: 0, "
        "l_cache: 1}\n"
    )
    words = [
        "--config",
        str(file),
        "--algo.advantage.estimator",
        "gtpo_entropy",
        "--algo.gtpo_entropy.version",
        "v7",
    ]
    assert sorted(problems(task, *words)) == [
        f"algo.gtpo_entropy.alpha1: expected number >= 0 or null, got -1 ({file}:3)",
        f"algo.gtpo_entropy.length_penalty.l_max: expected integer > 0 or null, got 0 ({file}:4)",
        "algo.gtpo_entropy.version: expected one of v1, v1u, v2, v6, got v7 (command line); did "
        "you mean v6?",
    ]


def test_the_importance_correction_is_one_that_exists(task):
    prefix = "--algo.advantage.is_correction_"
    assert problems(task, f"{prefix}level", "seq") == []
    assert problems(task, f"{prefix}level", "token", f"{prefix}mode", "clip") == []
    (message,) = problems(task, f"{prefix}level", "seq", f"{prefix}mode", "clip")
    assert message.startswith(
        "algo.advantage.is_correction_mode clip requires level token and gating ratio"
    )
    (message,) = problems(task, f"{prefix}level", "token", f"{prefix}gating", "tv")
    assert message.startswith(
        "algo.advantage.is_correction_gating tv takes an upper bound only: got [0.5, 5.0]"
    )
    assert (
        problems(
            task, f"{prefix}level", "token", f"{prefix}gating", "tv", f"{prefix}threshold", "0.1"
        )
        == []
    )
    (message,) = problems(task, f"{prefix}threshold", "5", "2")
    assert message.startswith(
        "algo.advantage.is_correction_threshold: expected 2 numbers LOW HIGH with 0 <= LOW <= HIGH"
    )
    assert problems(task, f"{prefix}threshold", "1", "2", "3") != []


def test_only_a_loss_has_a_gradient(task):
    unbiased = ["--algo.kl.init_coef", "0.1", "--algo.kl.unbiased_gradient"]
    (message,) = problems(task, *unbiased)
    assert (
        message.startswith("algo.kl.unbiased_gradient needs place loss")
        and "add algo.kl.use_loss" in message
    )
    assert problems(task, *unbiased, "--algo.kl.use_loss") == []


def test_the_initial_entropy_is_measured_over_a_number_of_prompts(task):
    words = [
        "--algo.advantage.estimator",
        "gtpo_conflict",
        "--algo.gtpo_conflict.initial_entropy_prompts",
    ]
    assert problems(task, *words, "8") == []
    for value in ("-1", "true", "many"):
        (message,) = problems(task, *words, value)
        assert message == (
            f"algo.gtpo_conflict.initial_entropy_prompts: expected integer >= 0, got {value} "
            "(command line)"
        )


def test_the_critic_is_a_model_that_can_be_built(task, tmp_path: Path):
    critic = tmp_path / "critic"
    shutil.copytree(task.folder / "policy", critic)
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    words = ["--critic.model_name_or_path", str(critic), "--critic.num_gpus_per_node", "2"]
    (message,) = problems(task, "--algo.advantage.estimator", "gae", *words)
    assert (
        message.startswith("critic.model_name_or_path: ") and "hidden_act must be 'silu'" in message
    )
    assert problems(task, *words) == []


def test_a_model_of_another_kind_is_complained_about_once(task):
    (message,) = problems(task, "--actor.model_name_or_path", "absent")
    assert "absent does not exist" in message


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    task = Task.make(tmp_path)
    file = tmp_path / "policy/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    (message,) = problems(task)
    for part in (
        "actor.model_name_or_path: ",
        "missing from the checkpoint: ['model.layers.1.mlp.up_proj.weight']",
        "model.norm.weight: (5,), config.json says (128,)",
    ):
        assert part in message


def test_a_critics_checkpoint_may_hold_a_value_head_and_a_policys_may_not(tmp_path):
    make_tiny_policy(tmp_path)
    check_files(str(tmp_path), read_model_shape(tmp_path))
    check_files(str(tmp_path), read_value_shape(tmp_path, "score"))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(1, 128)}, tmp_path / "model.safetensors")
    check_files(str(tmp_path), read_value_shape(tmp_path, "score"))
    with pytest.raises(ValueError, match=r"no rule uses: \['score.weight'\]"):
        check_files(str(tmp_path), read_model_shape(tmp_path))


def test_a_downloaded_model_meets_the_rules_that_a_hub_name_passed_by(task, monkeypatch, tmp_path):
    monkeypatch.setattr(job, "downloaded", lambda option, name: str(task.folder / "policy"))
    hub = ["--actor.model_name_or_path", "org/name"]
    fits = load(task, *hub)
    assert job.with_local_model(fits).actor.model_name_or_path == str(task.folder / "policy")
    too_wide = load(
        task,
        *hub,
        "--megatron.tensor_parallel_size",
        "16",
        "--actor.num_gpus_per_node",
        "16",
        "--data.max_len",
        "9999",
    )
    with pytest.raises(
        ConfigError, match="must divide the model's attention heads: got 16"
    ) as error:
        job.with_local_model(too_wide)
    assert "data.max_len must not exceed" in str(error.value)
    shutil.copytree(task.folder / "policy", tmp_path / "hollow")
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "hollow/model.safetensors")
    monkeypatch.setattr(job, "downloaded", lambda option, name: str(tmp_path / "hollow"))
    with pytest.raises(ConfigError, match="missing from the checkpoint"):
        job.with_local_model(fits)


def test_a_model_that_cannot_be_downloaded_is_named_with_its_option_before_ray_starts(
    task, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(job, "run_once", lambda *_: pytest.fail("the run began"))
    with pytest.raises(
        ConfigError, match="actor.model_name_or_path: org/name is not a folder on this machine"
    ) as error:
        job.run(load(task, "--actor.model_name_or_path", "org/name"), Guard())
    assert "give the folder of a checkpoint with weights" in str(error.value)


def test_a_reward_file_is_imported_before_a_run_starts(task, tmp_path, monkeypatch):
    (line,) = map(str, try_user_code(load(task)))
    assert line.startswith(
        "reward.remote_url: '0' made as the answer to the first prompt: reward "
    ), line
    assert try_user_code(load(task, "--reward.remote_url", "http://host")) == []
    broken = tmp_path / "reward.py"
    broken.write_text("import no_such_module\ndef reward_func(queries, prompts, labels): ...\n")
    config = load(task, "--reward.remote_url", str(broken))
    monkeypatch.setattr(job, "run_once", lambda *_: pytest.fail("the run began"))
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        job.run(config, Guard())


AGENT = Path(__file__).parents[2] / "examples/python/agent_retry.py"


def test_files_of_the_users_own_are_tried_on_something_tiny(task, tmp_path, monkeypatch):
    agent = ["--reward.remote_url", "null", "--train.agent_func_path", str(AGENT)]
    (line,) = map(str, try_user_code(load(task, *agent)))
    tried = (
        r"train.agent_func_path: '0' made as the answer to the first prompt, at each turn: turns "
        r"[13], reward "
    )
    assert re.match(tried, line), line
    # what this registers is of this test
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    reward, method = tmp_path / "reward.py", tmp_path / "own_tried.py"
    custom = ["--algo.advantage.estimator", "custom", "--algo.module_path", str(method)]
    method.write_text(OWN_METHOD.replace("reward_sign_e2e", "reward_sign_tried"))
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n    raise OSError('no server')\n"
    )
    tried = try_user_code(load(task, *custom, "--reward.remote_url", str(reward)))
    assert [trial.raised for trial in tried] == [False, True]
    lines = [*map(str, tried)]
    assert re.match(
        r"algo.module_path: reward_sign_tried, 3 made groups of \d+: advantages -1 to 1, loss ",
        lines[0],
    )
    monkeypatch.setenv("JUDGE_KEY", "abc")
    reward.write_text(
        "import os\ndef reward_func(queries, prompts, labels):\n    return "
        "os.environ['JUDGE_KEY']\n"
    )
    (tried,) = try_user_code(load(task, "--reward.remote_url", str(reward)))
    assert "see JUDGE_KEY of the environment with --reward.environment JUDGE_KEY only" in tried.text
    assert "which failed: reward_func of" in lines[1] and "OSError: no server" in lines[1], (
        "it may be up by then"
    )
    reward.write_text("def reward_func(queries, prompts, labels):\n    return 1.0\n")
    method = tmp_path / "own_wrong.py"
    custom[-1] = str(method)
    method.write_text(
        OWN_METHOD.replace("reward_sign_e2e", "reward_sign_wrong").replace("success_B", "sucess_B")
    )
    with pytest.raises(ConfigError) as error:
        try_user_code(load(task, *custom, "--reward.remote_url", str(reward)))
    algorithm, grader = (violation.message for violation in error.value.violations)
    assert (
        f'File "{method}", line 14, in advantages' in algorithm
        and "did you mean success_B?" in algorithm
    )
    assert "must return a dict with the key 'rewards'" in grader


SHORTEST = "[1.0 if len(one) == min(map(len, {0})) else 0.0 for one in {0}]"
OWN = (
    "def reward_func(queries, prompts, labels):\n    return {'rewards': "
    + SHORTEST.format("queries")
    + "}\n"
)


def test_a_function_that_compares_completions_gets_the_group_or_is_refused(task, tmp_path):
    reward = tmp_path / "shortest.py"
    reward.write_text(
        f"def shortest(completions, **kwargs):\n    return {SHORTEST.format('completions')}\n"
    )
    several, one = (
        [
            "--reward.remote_url",
            str(reward),
            "--rollout.n_samples_per_prompt",
            n,
            "--train.batch_size",
            "8",
            "--algo.advantage.estimator",
            "reinforce",
        ]
        for n in "21"
    )
    (line,) = map(str, try_user_code(load(task, *several)))
    assert line.endswith("reward 1, score 1; it compares the completions of a prompt")
    with pytest.raises(
        ConfigError, match="it compares them.*here 1. completions of a prompt, of which there must"
    ):
        try_user_code(load(task, *one))
    reward.write_text(OWN)
    with pytest.raises(ConfigError, match="in other forms it gets one at a time"):
        try_user_code(load(task, *several))
    random = OWN.replace("1.0 if", "__import__('random').random() if")
    for harmless in (OWN.replace("min(map(len, queries))", "10"), random):
        # one that grades each for itself, and one that says nothing twice
        reward.write_text(harmless)
        (line,) = map(str, try_user_code(load(task, *several)))
        assert "it compares" not in line


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_file_that_cannot_be_imported_is_in_the_report_of_all_mistakes(task, tmp_path, dry):
    agent = tmp_path / "agent.py"
    wrong = [
        "--rollout.top_p",
        "2",
        "--reward.remote_url",
        "null",
        "--train.agent_func_path",
        str(agent),
    ]
    for text, says in (
        (
            "def limit():\n    raise ValueError('no key')\nlimit()\n",
            f'File "{agent}", line 2, in limit\n',
        ),
        ("import sys\nsys.exit(3)\n", f'File "{agent}", line 2, in <module>\n'),
        ("", "train.agent_func_path: " + str(agent) + " must define a class AgentExecutor"),
    ):
        agent.write_text(f"{text}class AgentExecutor: ...\n")
        with pytest.raises(ConfigError) as error:
            train_ppo_ray.start([*task.options("out"), *wrong, *dry])
        about_top_p, about_agent = (violation.message for violation in error.value.violations)
        assert about_top_p.startswith("rollout.top_p") and says in about_agent, about_agent
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_module\ndef reward_func(queries, prompts, labels): ...\n")
    with pytest.raises(ConfigError, match="rollout.top_p(.|\n)*No module named 'no_such_module'"):
        train_ppo_ray.start(
            [*task.options("out"), "--rollout.top_p", "2", "--reward.remote_url", str(reward), *dry]
        )


def test_what_is_not_on_this_machine_is_said_before_ray(task, monkeypatch):
    monkeypatch.setattr("openrlhf_ext.run.preflight.glob.glob", lambda _: [])
    warnings = load(task, "--vllm.sync_backend", "nccl").warnings
    assert "vllm.sync_backend nccl needs GPUs, but this machine has none" in "".join(warnings)

    def unreachable(name: str, data_dir: str | None = None) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    monkeypatch.setattr(job, "run_once", lambda *_: pytest.fail("the run began"))
    config = load(task, "--data.prompt_dataset", "openai/gsm8k")
    with pytest.raises(
        ConfigError, match="data.prompt_dataset: openai/gsm8k cannot be read: Couldn"
    ):
        job.run(config, Guard())


def test_models_and_data_sets_of_the_hub_may_be_in_its_cache(task, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    data, model = (
        ["--data.prompt_dataset", "openai/gsm8k"],
        ["--actor.model_name_or_path", "Qwen/Qwen2.5-7B"],
    )
    named = ["actor.model_name_or_path Qwen/Qwen2.5-7B", "data.prompt_dataset openai/gsm8k"]
    config = load(task, *data, *model)
    assert unseen_inputs(config) == named
    (tmp_path / "datasets--openai--gsm8k/snapshots").mkdir(parents=True)
    assert unseen_inputs(config) == named[:1]
    (tmp_path / "models--Qwen--Qwen2.5-7B/snapshots").mkdir(parents=True)
    assert unseen_inputs(config) == []


GUIDED = ["--algo.advantage.estimator", "mixed_policy_dapo", "--guide.model_name_or_path"]


def test_a_guide_without_ranks_of_its_own_has_the_policys_architecture(task, tmp_path):
    make_tiny_policy(tmp_path / "guide", seed=1)
    words = [*GUIDED, str(tmp_path / "guide")]
    assert problems(task, *words) == []
    config = json.loads((tmp_path / "guide/config.json").read_text())
    (tmp_path / "guide/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    (message,) = problems(task, *words)
    assert "must have the architecture of actor.model_name_or_path" in message
    assert (
        "got rms_norm_eps 1e-05 and 1e-06; give the guide ranks of its own "
        "(guide.num_gpus_per_node)" in message
    )
    assert problems(task, *words, "--guide.num_gpus_per_node", "2") == []
    (tmp_path / "guide/config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (message,) = problems(task, *words)
    assert (
        message.startswith("guide.model_name_or_path: ") and "hidden_act must be 'silu'" in message
    )


def test_a_downloaded_guide_meets_the_rules_that_a_hub_name_passed_by(task, monkeypatch, tmp_path):
    make_tiny_policy(tmp_path / "guide", seed=1)
    monkeypatch.setattr(job, "downloaded", lambda option, name: str(tmp_path / "guide"))
    config = load(task, *GUIDED, "org/guide")
    assert job.with_local_model(config).guide.model_name_or_path == str(tmp_path / "guide")
    (tmp_path / "guide/tokenizer.json").write_text('{"model": {"vocab": {}}}')
    shape = json.loads((tmp_path / "guide/config.json").read_text())
    (tmp_path / "guide/config.json").write_text(
        json.dumps(shape | {"rope_theta": 5e5, "rope_parameters": None})
    )
    with pytest.raises(ConfigError, match="token ids mean different tokens") as error:
        job.with_local_model(config)
    assert "must have the architecture of actor.model_name_or_path" in str(error.value)


# ---- the machine


def shared_memory(monkeypatch, free: int) -> None:
    real = shutil.disk_usage
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda path: usage if path == "/dev/shm" else real(path)
    )


def test_a_full_shared_memory_and_too_few_open_files_are_said_before_the_start_in_one_report(
    task, monkeypatch
):
    shared_memory(monkeypatch, 1 << 20)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (64, 524288))
    told = "\n".join(problems(task))
    assert (
        "/dev/shm must have 4 MiB free for data that processes share, but only 1 MiB are free: "
        "delete"
        in told
        and "--shm-size" in told
    )
    assert (
        "must be allowed 192 open files, more with many ranks and engines: the limit is 64; raise "
        "it (ulimit" in told
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert problems(task) == [], "its processes start elsewhere"


def test_what_was_seen_to_be_enough_is_enough(task, monkeypatch):
    shared_memory(monkeypatch, 8 << 20)
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (256, 256))
    assert problems(task) == []


def test_an_estimator_that_does_not_exist_gets_no_critic(task):
    (told,) = problems(
        task, "--algo.advantage.estimator", "gtpo", "--critic.num_gpus_per_node", "3"
    )
    assert "two methods have this name: use gtpo_entropy" in told


def test_a_run_without_weights_is_refused_and_a_dry_run_is_not(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    given = {
        "actor.model_name_or_path": str(tmp_path / "model"),
        "data.max_len": 256,
        "rollout.max_new_tokens": 64,
    }
    (found,) = checkpoint_violations(build_config(given, origin="test", files=False))
    assert "holds no *.safetensors file, which a run loads" in found.message
    assert not [
        *checkpoint_violations(build_config(given | {"dry_run": True}, origin="test", files=False))
    ]
