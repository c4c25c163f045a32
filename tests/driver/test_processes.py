"""What ranks are told, and the order in which a run's processes start."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_ext.config import ConfigError, load_config
from openrlhf_ext.driver import processes
from openrlhf_ext.driver.job import build_experience
from openrlhf_ext.driver.preflight import findings
from openrlhf_ext.driver.processes import AuxiliaryModels
from openrlhf_ext.driver.settings import (
    check_frozen_steps,
    critic_settings,
    policy_path,
    policy_settings,
    reward_settings,
)
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.megatron.step.dealing import TOKENS
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.response import EngineStartError
from tests.driver.simulated import run_config
from tests.e2e.jobs import Task
from tests.models import make_tiny_model, make_tiny_policy
from tests.ranks.helpers import LocalGroup

GAE = {"algo__advantage__estimator": "gae", "critic__num_gpus_per_node": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task.make(tmp_path_factory.mktemp("run"))


def test_the_critic_shares_the_policys_settings_but_model_layout_and_optimizer(task):
    own = {
        "critic__megatron__tensor_parallel_size": 1,
        "critic__adam__lr": 1e-3,
        "critic__max_norm": 0.5,
        "critic__lr_scheduler": "constant",
        "critic__value_clip": "null",
        "ds__value_head_prefix": "head",
    }
    config = load_config(task.options("out", **GAE, **own))
    policy = policy_settings(config, steps=10)
    critic = critic_settings(config, policy, steps=10)
    assert (critic.optimizer.value_clip, critic.value_head) == (None, "head")
    assert critic.model_path == policy.model_path
    assert (critic.layout.tensor_parallel_size, critic.layout.data_parallel_size) == (1, 2)
    assert (policy.layout.tensor_parallel_size, policy.layout.data_parallel_size) == (2, 1)
    assert (critic.train, critic.megatron.param_dtype) == (policy.train, "fp32")
    optimizer = critic.optimizer
    assert (optimizer.adam.lr, optimizer.max_norm, optimizer.lr_scheduler) == (
        1e-3,
        0.5,
        "constant",
    )


def test_engines_leave_out_the_layers_that_training_leaves_out_of_each_model(task, tmp_path):
    deeper = tmp_path / "guide"
    make_tiny_model(deeper, layers=4)
    config = load_config(task.options("out", fp8__rollout_enable=True, fp8__layers_in_bf16_end=1))
    assert processes.bf16_layers(config, policy_path(config)) == [1]
    assert processes.bf16_layers(config, str(deeper)) == [3]
    assert processes.bf16_layers(load_config(task.options("out")), str(deeper)) is None


def test_engines_on_gpus_need_bf16(task):
    assert processes.fp8_env(use_gpu=True)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    config = load_config(task.options("out", fp8__rollout_enable=True, vllm__dtype="fp32"))
    with pytest.raises(
        ValueError, match="fp8.rollout_enable on GPUs needs vllm.dtype bf16.*got fp32"
    ):
        processes._create_engines(config, True, None, policy_path(config), 1, 0)
    config = load_config(task.options("out", ds__lora__rank=4, vllm__dtype="fp32"))
    with pytest.raises(
        ValueError, match="ds.lora.rank on GPUs needs vllm.dtype bf16.*got fp32.*vllm.lora merged"
    ):
        processes._create_engines(
            config, True, None, policy_path(config), 1, 0, adapter=(4, ("q_proj",))
        )


def test_adapters_of_a_mixture_are_refused_on_gpus_too(task, tmp_path):
    make_tiny_model(tmp_path / "mixture", "qwen3_moe", layers=2)
    config = load_config(task.options("out", ds__lora__rank=4))
    for use_gpu in (False, True):
        with pytest.raises(
            ValueError, match="adapters of a mixture of experts.*set vllm.lora merged"
        ):
            processes._create_engines(
                config, use_gpu, None, str(tmp_path / "mixture"), 1, 0, adapter=(4, ("q_proj",))
            )


def test_engines_on_gpus_that_tell_their_experts_take_a_kernel_that_does(task, monkeypatch):
    """With a stand-in for the actor, of which only the arguments are of interest."""
    given = []
    monkeypatch.setattr(launch, "_gpu_placements", lambda options, places: [({}, {})])
    monkeypatch.setattr(
        launch, "EngineFleet", lambda start, count: [start(index) for index in range(count)]
    )
    actor = SimpleNamespace(
        options=lambda **_: SimpleNamespace(remote=lambda **arguments: given.append(arguments))
    )
    monkeypatch.setattr(launch.ray, "remote", lambda kind: actor)
    # the real one would start a Ray that outlives the test
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: context)
    options = load_config(task.options("out")).vllm.model_copy(
        update={"num_engines": 1, "dtype": "bf16", "gpu_memory_utilization": 0.5, "max_requests": 8}
    )
    for routed in (True, False):
        launch.create_rollout_engines(
            "policy",
            options,
            max_model_len=64,
            request_timeout_s=1.0,
            executor_factory=list,
            use_gpu=True,
            seed=0,
            places=object(),
            routed_experts=routed,
        )
    assert [arguments.get("moe_backend") for arguments in given] == ["triton", None]


def test_the_policys_schedule_leaves_out_the_steps_in_which_it_is_frozen(task):
    config = load_config(
        task.options(
            "out", **GAE, critic__freezing_steps=2, train__batch_size=16, train__max_epochs=2
        )
    )
    policy = policy_settings(config, steps=10)
    assert policy.updates == 7 * 2 * 2  # 32 samples are two updates, twice over
    assert critic_settings(config, policy, steps=10).updates == 10 * 2 * 2


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"algo__kl__init_coef": 0.1}, True),
        ({"algo__kl__init_coef": 0.1, "ref__num_gpus_per_node": 2}, False),
    ],
)
def test_the_policy_keeps_its_starting_weights_only_for_a_reference_without_ranks(
    task, options, kept
):
    config = load_config(task.options("out", **options))
    settings = policy_settings(config, steps=1)
    assert settings.host_copies == ({"reference": settings.model_path} if kept else {})


POLICY, OWN = LocalGroup(1, 2), LocalGroup(2, 2)


def test_a_guide_is_kept_like_a_reference_or_scores_on_ranks_of_its_own(task, tmp_path):
    make_tiny_policy(tmp_path / "guide", seed=1)
    guided = {
        "algo__advantage__estimator": "mixed_policy_dapo",
        "guide__model_name_or_path": tmp_path / "guide",
    }
    config = load_config(
        task.options("out", **guided, algo__kl__init_coef=0.1, algo__kl__use_loss="true")
    )
    settings = policy_settings(config, steps=1)
    assert settings.host_copies == {
        "reference": settings.model_path,
        "guide": str(tmp_path / "guide"),
    }
    parts = AuxiliaryModels().scorers(config, policy=POLICY)
    assert (parts["guide"].group, parts["guide"].method) == (POLICY, "guide_logprobs")
    assert (parts["reference"].group, parts["reference"].method) == (POLICY, "reference_logprobs")

    config = load_config(task.options("out", **guided, guide__num_gpus_per_node=4))
    assert policy_settings(config, steps=1).host_copies == {}
    scorer = AuxiliaryModels(frozen={"guide": OWN}).scorers(config, policy=POLICY)["guide"]
    assert (scorer.group, scorer.method) == (OWN, "forward")


def parts_of(config):
    """What the experience maker is built from, without processes."""
    return SimpleNamespace(
        config=config,
        policy=POLICY,
        auxiliary=AuxiliaryModels(),
        tokenizer=SimpleNamespace(eos_token_id=0),
    )


def test_the_experience_maker_gets_only_what_the_run_needs(task):
    config = load_config(task.options("out"))
    assert AuxiliaryModels().scorers(config, policy=None) == {}
    made = build_experience(parts_of(config), TOKENS)
    assert made.critic is made.kl is made.scoring.values is None
    config = load_config(task.options("out", algo__kl__init_coef=0.1, algo__kl__target=0.2))
    parts = AuxiliaryModels().scorers(config, policy=POLICY)
    assert (parts["reference"].group, parts["reference"].method) == (POLICY, "reference_logprobs")
    kl = build_experience(parts_of(config), TOKENS).kl
    assert (kl.value, kl.target, kl.horizon) == (0.1, 0.2, 10000)
    parts = AuxiliaryModels(frozen={"reference": OWN}).scorers(config, policy=POLICY)
    assert (parts["reference"].group, parts["reference"].method) == (OWN, "forward")


def test_a_reward_model_is_laid_out_as_the_policy_and_the_critic_starts_from_it(task):
    reward = {
        "reward__model_name_or_path": task.folder / "policy",
        "reward__remote_url": "null",
        "reward__num_gpus_per_node": 4,
        "reward__normalize_enable": "true",
        "ds__value_head_prefix": "head",
    }
    with pytest.raises(ConfigError, match="has no value head head.weight"):
        load_config(task.options("out", **GAE, **reward), more_rules=findings)
    config = load_config(task.options("out", **GAE, **reward))
    policy = policy_settings(config, steps=10)
    settings, critic = reward_settings(config, policy), critic_settings(config, policy, steps=10)
    assert (settings.layout.tensor_parallel_size, settings.layout.data_parallel_size) == (2, 2)
    assert settings.optimizer is None and (settings.value_head, settings.normalize_values) == (
        "head",
        True,
    )
    assert (
        critic.model_path == settings.model_path == str(task.folder / "policy")
        and critic.normalize_values
    )
    scorer = AuxiliaryModels(reward=OWN).scorers(config, policy=POLICY)["reward"]
    assert (scorer.group, scorer.method) == (OWN, "forward")


PROBE = {"weight_sync/probe_diff": 0.0}


def test_everybody_has_given_up_its_memory_before_a_critic_or_a_checkpoint_is_loaded(
    monkeypatch,
) -> None:
    order: list[str] = []

    class Recorder:
        def __init__(self, name: str, result: Any = None) -> None:
            self.remote = lambda *_: order.append(name) or result

    engine = SimpleNamespace(
        ping=Recorder("ping"),
        sleep=Recorder("engine sleeps"),
        process_info=Recorder("info", {"pid": 1, "host": "here"}),
        continuation=Recorder("continuation", ([7, 8, 9], [-0.1, -0.7, -3.0])),
    )
    policy = SimpleNamespace(
        ask=lambda name, *_: order.append(name) or [{"rank": 0, "phases": None, **PROBE}]
    )
    config = run_config(vllm={"enable_sleep": True}, ds={"enable_sleep": True})
    session = SimpleNamespace(remember=lambda *_: None, watch=lambda *_: None, use_gpu=False)
    monkeypatch.setattr("openrlhf_ext.rollout.launch.wait_until_ready", lambda *_: None)
    monkeypatch.setattr(processes, "policy_settings", lambda *_: None)
    monkeypatch.setattr(processes, "sync_settings", lambda *_: None)
    deadline = SimpleNamespace(get=lambda references: references, remaining=1.0)
    probe = processes.await_engines(config, session, [engine], [1, 2, 3], deadline)
    assert probe == [1, 2, 3, 7, 8], "the last token's probability is the nearest to one half"
    processes.initialize_policy(
        config, session, policy, [engine], probe, steps=1, deadline=deadline
    )
    processes.prove_start(config, policy, [engine], deadline)
    assert order == [
        "info",
        "continuation",
        "engine sleeps",
        "init_model",
        "prove_sync",
        "engine sleeps",
    ]


def test_the_workspace_of_the_head_is_an_option(task):
    assert policy_settings(load_config(task.options("out")), 3).megatron.head_workspace_mib == 256
    config = load_config(task.options("out", megatron__head_workspace_mib=3))
    assert policy_settings(config, 3).megatron.head_workspace_mib == 3


def test_policy_and_critic_communicate_beside_computing_where_that_is_asked_for(task):
    asked = {"overlap_grad_reduce": "true", "overlap_param_gather": "true", "ddp_bucket_size": 5}
    config = load_config(
        task.options("out", **GAE, **{f"megatron__{name}": value for name, value in asked.items()})
    )
    policy = policy_settings(config, 3)
    for settings in (policy, critic_settings(config, policy, 3)):
        megatron = settings.megatron
        assert (
            megatron.overlap_grad_reduce
            and megatron.overlap_param_gather
            and megatron.ddp_bucket_size == 5
        )


def test_the_policy_is_trained_before_the_run_ends(task):
    gae = {"algo__advantage__estimator": "gae", "critic__num_gpus_per_node": 2}
    config = load_config(task.options("out", **gae, critic__freezing_steps=1))
    check_frozen_steps(config, 3)
    with pytest.raises(ValueError, match=r"never trained: got 1 \(the first 2 steps\) and 2 steps"):
        check_frozen_steps(config, 2)
    check_frozen_steps(load_config(task.options("out")), 1)


def test_nothing_that_starts_may_wait_longer_than_the_parent_was_told(monkeypatch):
    """Of 900 s 850 are gone: whoever waits now may wait for 50, and says so himself."""
    waited: dict[str, float] = {}
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        processes,
        "reserve",
        lambda count, limit_s, what, shared=False: waited.update({what: limit_s}),
    )
    monkeypatch.setattr(
        launch, "wait_until_ready", lambda engines, limit_s, name: waited.update({name: limit_s})
    )
    monkeypatch.setattr(processes, "_start_ranks", lambda *_: None)
    # Ray would start by itself, and stay
    monkeypatch.setattr(Deadline, "get", lambda _, references: references)
    config, session, deadline = (
        run_config(algo={"advantage": {"estimator": "gae"}}),
        SimpleNamespace(),
        Deadline(),
    )
    with deadline.limit(900.0, "starting", "vllm.start_timeout_s"):
        now[0] = 850.0
        processes.reserve_policy_places(config, deadline)
        processes.AuxiliaryModels.start(config, deadline)
        processes._await_engines(session, [], deadline, "rollout engine")
        processes.await_guide_engines(session, [], deadline)
    assert set(waited) == {
        "the policy's ranks",
        "the critic's ranks",
        "rollout engine",
        "guide engine",
    }
    assert set(waited.values()) == {50.0}


def test_engines_that_are_late_are_named_with_the_option(monkeypatch):
    engine = SimpleNamespace(ping=SimpleNamespace(remote=lambda: 1))
    free = {"wait": lambda *_, **__: ([], [1]), "available_resources": dict}
    monkeypatch.setattr(launch, "ray", SimpleNamespace(**free))
    with pytest.raises(
        EngineStartError, match=r"engines \[0\] were not ready within 0.1 s .*vllm.start_timeout_s"
    ):
        launch.wait_until_ready([engine], 0.1)
