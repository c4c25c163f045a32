"""The layout that a run gets which was given none, and what is refused because it fits on no GPU:
by the command that a user types, and by its functions for many models."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from openrlhf_ext.cli.main import chosen_layout
from openrlhf_ext.cli.train_ppo_ray import findings, main
from openrlhf_ext.config import ConfigError, RunConfig, load_config
from openrlhf_ext.driver import job
from openrlhf_ext.planning import fit
from openrlhf_ext.planning.candidate import with_options
from openrlhf_ext.planning.memory import GIB
from openrlhf_ext.planning.search import Planner
from tests.e2e.jobs import Task

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs/models"
SHARED = {"train__colocate_all": True, "ds__enable_sleep": True, "vllm__enable_sleep": True}


def words(model: str, ranks: int, **options: object) -> list[str]:
    given = {
        "actor.model_name_or_path": MODELS / model,
        "actor.num_nodes": -(-ranks // 8),
        "actor.num_gpus_per_node": min(8, ranks),
        "rollout.batch_size": 128,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 1024,
        "algo.advantage.estimator": "grpo",
        "dry_run": True,
    } | {name.replace("__", "."): value for name, value in options.items()}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def load(model: str, ranks: int, **options: object) -> RunConfig:
    return load_config(
        words(model, ranks, **options), files=False, more_rules=findings, choice=chosen_layout
    )


def refusal(model: str, ranks: int, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(model, ranks, **options)
    (violation,) = error.value.violations
    return violation.message


def sizes(config: RunConfig) -> tuple[int, int, int]:
    layout = config.layout
    return layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size


def fullest(config: RunConfig) -> float:
    """Of a GPU of the policy: the share that is taken."""
    laid_out = Planner(config).as_configured()
    moments = laid_out.moments if config.train.colocate_all else laid_out.moments[1:]
    return max(moment.total for moment in moments) / laid_out.memory


CROWDED = {
    ("qwen2.5-32b", 8),
    ("qwen3-32b", 8),
    ("qwen3-30b-a3b", 8),
    ("qwen3.5-27b-text", 8),
    ("qwen3.5-35b-a3b-text", 8),
}
"""States alone take most of the GPU."""
TOO_LONG = {("qwen3.5-35b-a3b-text", 8, 32768)}
"""With ranks and engines on the same GPUs the activations do not fit beside the states."""
TOO_FEW = {
    ("llama-3.1-70b", 4, False),
    ("llama-3.1-70b", 8, False),
    ("llama-3.1-70b", 8, True),
    # 18 bytes a parameter are more than these GPUs have
    ("qwen2.5-32b", 4, False),
    ("qwen3-32b", 4, False),
    ("qwen3.5-27b-text", 4, False),
    ("qwen3.5-35b-a3b-text", 4, False),
    ("qwen3-30b-a3b", 4, False),
    ("qwen3-235b-a22b", 4, False),
    ("qwen3-235b-a22b", 8, False),
    ("qwen3-235b-a22b", 8, True),
    ("qwen3-235b-a22b", 16, True),
    ("qwen3-235b-a22b", 32, False),
    # 73.9 of 79.6 GiB, and an engine asleep, contexts and buffers take 6
    ("llama-3.1-70b", 16, True),
}


@pytest.mark.parametrize("model", sorted(path.name for path in MODELS.iterdir()))
def test_every_model_gets_a_layout_that_fits_wherever_its_states_do(model: str):
    """What leaves a tenth of the GPU free as it is written stays so; what fits nowhere is refused
    with the GPUs that would fit."""
    tp = (
        8
        if model.endswith(("70b", "32b", "a22b"))
        else 4
        if model.removesuffix("-text").endswith(("7b", "8b", "a3b"))
        else 1
    )
    for gpus, shared, tokens in itertools.product((8, 16, 64), (False, True), (4096, 32768)):
        ranks, at = gpus if shared else gpus // 2, f"{gpus} GPUs, shared {shared}, {tokens} tokens"
        options = {"vllm__tensor_parallel_size": tp, "data__max_len": tokens}
        options |= {"vllm__num_engines": gpus // tp, **SHARED} if shared else {}
        if (model, ranks, shared) in TOO_FEW:
            said = refusal(model, ranks, **options)
            assert "an H100 (there is no GPU here) has 79.6" in said, at
            assert (
                "no layout of these GPUs fits; actor.num_nodes" in said and "would fit" in said
            ), at
            continue
        config, as_written = (
            load(model, ranks, **options),
            load_config(words(model, ranks, **options), files=False),
        )
        most = 1 if (model, ranks) in CROWDED else 0.9
        if (model, ranks, tokens) in TOO_LONG:
            assert any("no other layout of these GPUs needs less" in w for w in config.warnings)
            most = 1.05
        assert fullest(config) <= most, at
        unchanged = sizes(config) == (1, 1, 1) and config.layout.expert_parallel_size == 1
        assert (unchanged and config.megatron.recompute == "none") == (
            fullest(as_written) <= 0.9
        ), at


def test_a_mixture_is_laid_out_over_its_experts_too():
    options = {
        "vllm__tensor_parallel_size": 4,
        "vllm__num_engines": 2,
        "data__max_len": 4096,
        **SHARED,
    }
    config = load("qwen3-30b-a3b", 8, **options)
    layout = config.layout
    assert layout.expert_parallel_size > 1 and layout.expert_tensor == 1 and fullest(config) <= 1
    (line,) = (line for line in config.warnings if line.startswith("megatron.layout auto"))
    assert f"expert_parallel_size: {layout.expert_parallel_size}" in line
    kept = load(
        "qwen3-30b-a3b", 8, megatron__layout="auto", megatron__expert_parallel_size=8, **options
    )
    assert kept.layout.expert_parallel_size == 8 and kept.layout.pipeline_parallel_size == 1
    said = refusal("qwen3-30b-a3b", 8, megatron__tensor_parallel_size=1, **options)
    assert (
        "got 1 * 1 on 8 ranks, megatron.expert_parallel_size 1, with which training takes" in said
    )
    assert re.search(r"leave the sizes out, .* or use megatron: {.*expert_parallel_size: \d", said)
    said = refusal(
        "qwen3-30b-a3b", 8, ds__lora__rank=4, ds__lora__target_modules="up_proj", **options
    )
    assert said.endswith("got up_proj; adapters of a mixture's experts are not built"), (
        "and no plan is made of it"
    )


def dry_run(
    task: Task, capsys: pytest.CaptureFixture[str], **options: object
) -> tuple[int, str, str]:
    model = {"actor__model_name_or_path": MODELS / "llama-3.1-70b", "actor__num_gpus_per_node": 8}
    given = task.given(
        "out",
        **(model | {"vllm__tensor_parallel_size": 8, "megatron__param_dtype": "bf16"} | options),
    )
    del given["megatron.tensor_parallel_size"]
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    capsys.readouterr()
    return main([*argv, "--dry_run"]), *capsys.readouterr()


def test_a_70b_script_without_sizes_gets_some_or_is_refused_with_the_gpus_that_would_do(
    tmp_path, capsys
):
    task = Task.make(tmp_path)
    code, _, error = dry_run(task, capsys)
    assert (
        code == 2
        and "must split the models so that a rank fits on a GPU: got 1 * 1 on 8 ranks, with which"
        in error
    )
    assert (
        "training takes 496.8 GiB before any activation (gradients (fp32) 262.8, weights 131.4, "
        "optimizer" in error
    )
    on_host = "; it fits with ds.adam_offload too, which keeps the optimizer states in host memory"
    assert (
        f"would fit{on_host}; set megatron.gpu_memory_gib to the memory of the run's GPUs" in error
    )
    code, _, error = dry_run(task, capsys, train__sead=1, train__batch_size=33)
    assert code == 2 and error.startswith("4 problems"), "in one report with the others"
    code, out, error = dry_run(task, capsys, actor__num_nodes=4)
    assert code == 0, error
    (line,) = (line for line in out.splitlines() if "  - megatron.layout auto: " in line)
    assert (
        "megatron: {tensor_parallel_size: " in line
        and "; set these options to keep it. While training, the fullest" in line
    )
    assert re.search(r"parallel_size: \d+  # set: chosen: megatron.layout auto \(default: 1\)", out)
    assert out.startswith("would start\n"), out[:200]


def test_what_a_run_sets_stays_and_only_the_rest_is_chosen():
    small = {"megatron__gpu_memory_gib": 40}
    assert sizes(load("qwen2.5-7b", 8, **small)) == (1, 4, 1)
    kept = load("qwen2.5-7b", 8, megatron__layout="auto", megatron__tensor_parallel_size=2, **small)
    assert sizes(kept)[0] == 2 and kept.sources["megatron.tensor_parallel_size"] == "command line"
    assert fullest(kept) <= 1 and kept.layout.pipeline_parallel_size == 2, (
        "what it does not set is chosen"
    )
    said = refusal("qwen2.5-7b", 8, megatron__tensor_parallel_size=1, **small)
    assert (
        "a GPU (megatron.gpu_memory_gib) has 40.0; leave the sizes out, so that megatron.layout "
        "auto" in said
    )
    full = load("qwen2.5-7b", 8, actor__gradient_checkpointing_enable=True, **small)
    assert full.megatron.recompute == "full" and fullest(full) <= 1
    critic = {
        "algo__advantage__estimator": "gae",
        "critic__model_name_or_path": MODELS / "qwen3-8b",
    }
    own = load("qwen3-32b", 8, critic__num_gpus_per_node=4, vllm__tensor_parallel_size=8, **critic)
    assert (
        own.layout.model_parallel_size == 8
        and own.critic_layout.model_parallel_size <= 4
        and fullest(own) <= 1
    )


def test_sizes_for_deepspeed_stay_where_a_layout_fits_with_them():
    options = {"ds__ring_attn_size": 2, "data__max_len": 32768, "train__dynamic_batch_enable": True}
    assert load("qwen2.5-7b", 8, **options).layout.context_parallel_size == 2
    tight = SHARED | {
        "vllm__enable_sleep": False,
        "vllm__num_engines": 4,
        "vllm__gpu_memory_utilization": 0.7,
    }
    config = load("qwen2.5-3b", 4, data__max_len=8192, ds__ring_attn_size=4, **tight)
    assert config.layout.context_parallel_size == 1, (
        "four ranks that each hold all weights beside an awake engine"
    )
    instead = "megatron.context_parallel_size 1 instead of 4 (command line, as ds.ring_attn_size)"
    assert any(instead in warning for warning in config.warnings)


def test_ranks_of_a_reference_and_weights_of_an_engine_are_summed_too():
    reference = {"algo__kl__init_coef": 0.01, "ref__num_gpus_per_node": 2}
    config = load(
        "llama-3.1-70b",
        32,
        vllm__tensor_parallel_size=8,
        **(reference | {"ref__num_gpus_per_node": 8}),
    )
    assert config.layout.model_parallel_size == 8, "a copy of the reference is cut as the policy"
    said = refusal(
        "llama-3.1-70b",
        64,
        vllm__tensor_parallel_size=1,
        **reference | {"ref__num_gpus_per_node": 8},
    )
    assert (
        "vllm.tensor_parallel_size must be at least 2: an engine's weights take 131.4 GiB of a GPU"
        in said
    )


def test_a_reward_model_stays_on_the_gpus_that_it_shares():
    graded = {"reward__model_name_or_path": MODELS / "qwen2.5-7b", "reward__num_gpus_per_node": 8}
    beside = SHARED | graded | {"vllm__num_engines": 2, "vllm__tensor_parallel_size": 4}
    resident, offloaded = (
        load("qwen2.5-7b", 8, **beside, reward__offload=offload) for offload in (False, True)
    )
    assert sizes(offloaded) == (1, 1, 1) and resident.layout.model_parallel_size > 1
    training = Planner(resident).as_configured().moments[1].parts
    assert training["weights of the reward model"] > 0 and fullest(resident) <= 1
    apart = Planner(load("qwen2.5-7b", 8, **graded)).as_configured()
    assert apart.moments[-1].doing == "scoring by the reward model"


ON_HOST = [
    ("qwen3-32b", 8, "TP8", {"megatron__tensor_parallel_size": 8}),
    (
        "llama-3.1-70b",
        16,
        "TP8 PP2",
        {"megatron__tensor_parallel_size": 8, "megatron__pipeline_parallel_size": 2},
    ),
    ("llama-3.1-70b", 8, "TP8", {"megatron__tensor_parallel_size": 8}),
    ("qwen2.5-7b", 1, "one rank", {}),
]
"""Of docs/scaling.md's table."""


@pytest.mark.parametrize(("model", "ranks", "layout", "cut"), ON_HOST)
def test_states_in_host_memory_make_room_on_the_gpu(model, ranks, layout, cut):
    tp = min(8, ranks)
    options = {
        **SHARED,
        **cut,
        "vllm__tensor_parallel_size": tp,
        "vllm__num_engines": ranks // tp,
        "data__max_len": 16384,
        "megatron__recompute": "full",
        "megatron__sequence_parallel_enable": tp > 1,
    }
    config = load(model, ranks, ds__adam_offload=True, **options)
    planner = Planner(config)
    laid_out = planner.as_configured()
    training, policy = laid_out.moments[1], laid_out.policy
    assert "optimizer" not in training.parts and laid_out.fits
    passing = training.parts["Adam's states in transit (ds.adam_offload)"]
    assert 0 < passing <= 1.5 * GIB, "blocks"
    on_host = laid_out.host["Adam's states (ds.adam_offload), pinned"]
    assert on_host == tp * 12 * max(one.parameters for one in policy.states), (
        "12 bytes of each parameter"
    )
    assert laid_out.host["states of sleeping ranks"] == tp * policy.fullest.weights, (
        "what sleeps is the weights alone"
    )
    resident = Planner(with_options(config, {"ds.adam_offload": False})).as_configured()
    of_update = [planner.clock.train(one.policy) for one in (laid_out, resident)]
    assert 0.4 < of_update[0] - of_update[1] < 10, "one update a step takes seconds longer"
    before, after = (one.moments[1].total / GIB for one in (resident, laid_out))
    host = sum(laid_out.host.values()) / GIB
    row = f"| {model} | {ranks} | {layout} | {before:.1f} | {after:.1f} | {host:.0f} |"
    assert row in (ROOT / "docs/scaling.md").read_text(), row
    if not resident.fits:
        said = refusal(model, ranks, **options)
        assert (
            "; it fits with ds.adam_offload too, which keeps the optimizer states in host memory"
            in said
        )


def test_host_memory_that_the_node_has_not_is_refused_with_the_sum(monkeypatch):
    options = {
        "megatron__tensor_parallel_size": 8,
        "vllm__tensor_parallel_size": 8,
        "ds__adam_offload": True,
    }
    assert "ds.adam_offload" not in str(load("qwen3-32b", 8, **options).warnings), (
        "another machine's memory is unknown"
    )
    monkeypatch.setattr(
        fit, "_gpu_here", lambda: fit.Device("this machine's NVIDIA H100", fit.GPUS["H100"].memory)
    )
    monkeypatch.setattr(fit, "_memory_here", lambda: 400 << 30)
    load("qwen3-32b", 8, **options)
    said = refusal("qwen3-32b", 8, **options, ckpt__async_enable=True, ckpt__save_steps=5)
    assert said.startswith(
        "ds.adam_offload: the ranks of a node would keep 793.4 GiB in its host memory (checkpoint "
    )
    assert (
        "being written 427.2, Adam's states (ds.adam_offload), pinned 366.2), but this machine "
        "has 400" in said
    )
    assert said.endswith(
        "use more nodes, leave ckpt.async_enable out, or leave ds.adam_offload out"
    )
    monkeypatch.setattr(fit, "_memory_here", lambda: 300 << 30)
    assert "has 300.0; use more nodes, or leave" in refusal("qwen3-32b", 8, **options)


def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    whole, (limit, none) = (
        fit.psutil.virtual_memory().total,
        (tmp_path / "limit", tmp_path / "none"),
    )
    monkeypatch.setattr(fit, "_MEMORY_LIMITS", (str(limit), str(none)))
    assert fit._memory_here() == whole
    none.write_text("max\n")
    assert fit._memory_here() == whole
    limit.write_text("1048576\n")
    assert fit._memory_here() == 1 << 20


@pytest.fixture
def looked_at_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, not a dry one, needs weights, which the folders of ``MODELS`` do not have."""
    monkeypatch.setattr("openrlhf_ext.driver.preflight.checkpoint_violations", lambda config: ())


@pytest.mark.parametrize("of_cpu", [{"dry_run": False}, {"vllm__sync_backend": "gloo"}])
def test_a_run_on_cpu_is_laid_out_as_it_is_written(of_cpu, looked_at_only, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load("llama-3.1-70b", 2, **of_cpu)
    assert sizes(config) == (1, 1, 1) and not [
        line for line in config.warnings if "megatron.layout" in line
    ]
    given = load("qwen2.5-7b", 8, megatron__gpu_memory_gib=40, **of_cpu)
    assert sizes(given)[1] > 1, "memory that is given counts"


def test_a_dry_run_on_cpu_speaks_of_no_gpu(looked_at_only, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    toy = {"vllm__sync_backend": "gloo", "vllm__num_engines": 1}
    found = fit.verdict(load("qwen2.5-0.5b", 1, **toy))
    assert (
        "processes on CPU: 2: 1 ranks that train or score, 1 engines of 1 on others"
        in found.details
    )
    assert found.starts and not any(
        "GPU" in line or "H100" in line for line in (found.text, *found.details)
    )
    said = "\n".join(
        fit.verdict(load("qwen2.5-0.5b", 1, **toy, megatron__gpu_memory_gib=40)).details
    )
    assert "GPUs: 2: " in said and "memory of the fullest GPU, of 40.0 GiB" in said


def test_a_hub_model_is_laid_out_when_it_has_been_downloaded(looked_at_only, monkeypatch):
    config = load(
        "org/none",
        8,
        actor__model_name_or_path="org/name",
        megatron__gpu_memory_gib=40,
        dry_run=False,
    )
    assert any(
        "once the model's config.json is on this machine" in warning for warning in config.warnings
    )
    monkeypatch.setattr(job, "downloaded", lambda option, name: str(MODELS / "qwen2.5-7b"))
    assert sizes(job.with_local_model(config))[1] > 1
    monkeypatch.setattr(job, "downloaded", lambda option, name: str(MODELS / "llama-3.1-70b"))
    with pytest.raises(ConfigError, match="must split the models so that a rank fits on a GPU"):
        job.with_local_model(config)


def test_the_gpu_of_this_machine_is_asked_without_starting_cuda_here(monkeypatch):
    class Properties:
        name, total_memory = "NVIDIA H200", 40 << 30

    monkeypatch.setattr(fit.glob, "glob", lambda _: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    fit._gpu_here.cache_clear()
    try:
        config = load("qwen2.5-7b", 8, vllm__tensor_parallel_size=2)
        assert (
            sizes(config) == (1, 8, 1)
            and "40.0 GiB of this machine's NVIDIA H200" in config.warnings[-1]
        )
    finally:
        fit._gpu_here.cache_clear()
