"""The command that a user types: what it prints, writes and refuses; the layouts and the guide that
come with it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from benchmarks import plan as benchmark
from benchmarks import record
from benchmarks.plan import fit
from openrlhf_ext.cli import plan
from openrlhf_ext.cli.train_ppo_ray import dry_run
from openrlhf_ext.config import load_config
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.planning.search import SHARES
from openrlhf_ext.planning.seconds import MIXTURE_ERROR, STEP_ERROR, Assumptions
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_policy

ROOT = Path(__file__).parents[2]
LAYOUTS = sorted((ROOT / "configs/layouts").glob("*.yaml"))
QWEN25_7B = [
    "--config",
    str(ROOT / "configs/recipes/gsm8k_grpo.yaml"),
    "--actor.model_name_or_path",
    str(ROOT / "configs/models/qwen2.5-7b"),
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_models_have_their_published_numbers_of_parameters(name, parameters):
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.planning.memory import StateOptions, rank_states

    shape = read_model_shape(ROOT / "configs/models" / name)
    assert rank_states(shape, ParallelLayout(1), 0, StateOptions()).parameters == parameters


def test_a_plan_is_made_for_sequences_that_an_attention_window_holds(tmp_path, capsys):
    config = json.loads((ROOT / "configs/models/qwen2.5-0.5b/config.json").read_text())
    config |= {"sliding_window": 2048, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--actor.model_name_or_path", str(tmp_path), "--gpus", "2", "--data.max_len"]
    assert plan.main([*model, "2048"]) == 0 and plan.main([*model, "2049"]) == 2
    assert "got 2049 > 2048 tokens; set data.max_len to at most 2048" in capsys.readouterr().err


def test_drafts_cost_memory_and_are_planned_with_an_acceptance(tmp_path, capsys):
    sizes = {"hidden_size": 3584, "vocab_size": 152064, "num_attention_heads": 28, "head_dim": 128}
    own = {"model_type": "llama", "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | own))
    entries = 3 * 3584 * 3584 + 10**6
    save_file(
        {"fc.weight": torch.zeros(entries, dtype=torch.bfloat16)}, tmp_path / "head.safetensors"
    )
    asked = [*QWEN25_7B, "--gpus", "8", "--vllm.tensor_parallel_size", "2"]
    drafts = ["--vllm.speculative.method", "eagle3", "--vllm.speculative.path", str(tmp_path)]
    assert plan.main([*asked, *drafts]) == 2
    assert "--accepted must be from 0 to vllm.speculative.num_tokens = 3" in capsys.readouterr().err
    assert plan.main([*asked, "--accepted", "1"]) == 2
    assert "got 1 and vllm.speculative.method none" in capsys.readouterr().err
    seconds = []
    for words in ([], [*drafts, "--accepted", "0"], [*drafts, "--accepted", "1.5"]):
        out = tmp_path / f"plan{len(seconds)}.json"
        assert plan.main([*asked, *words, "--json", str(out)]) == 0
        first = json.loads(out.read_text())["configured"]
        seconds.append(first["seconds"]["rollout"])
    assert "of which 1.5 are accepted (--accepted)" in capsys.readouterr().out
    held = first["memory"]["sampling"]["engine: head that drafts"]
    assert held == 2 * (3 * 3584 * 3584 + 10**6 // 2)
    assert seconds[2] < seconds[0] < seconds[1]


def test_a_plan_is_printed_and_written_and_its_layout_loads(tmp_path, capsys):
    layout, out = tmp_path / "layout.yaml", tmp_path / "plan.json"
    assert plan.main([*QWEN25_7B, "--gpus", "8", "--write", str(layout), "--json", str(out)]) == 0
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    for part in (
        "7,615,616,512 parameters, on 8 H100",
        "FLOPs per token",
        "assumptions",
        "bottleneck:",
        "KV cache",
    ):
        assert part in text
    best = found["layouts"][0]
    steps = [one["seconds"]["step"] for one in found["layouts"]]
    assert steps[0] <= 1.05 * min(steps)
    for parts in best["memory"].values():
        assert sum(parts.values()) <= found["gpu"]["memory"]
    config = load_config([*QWEN25_7B[:2], "--config", str(layout), *QWEN25_7B[2:]], files=False)
    chosen = config.layout
    assert chosen.tensor_parallel_size == best["options"]["megatron.tensor_parallel_size"]
    assert config.world_size + config.engine_workers == 8


@pytest.mark.parametrize(
    "words", [(), ("--train.colocate_all", "--ds.enable_sleep", "--vllm.enable_sleep")]
)
def test_a_model_and_a_number_of_gpus_are_enough(tmp_path, capsys, words):
    """The engines' share and the group size are plan's where the run sets none; the file is one
    that a run takes."""
    layout, model = tmp_path / "layout.yaml", ["--actor.model_name_or_path", "Qwen/Qwen2.5-7B"]
    assert plan.main([*model, "--gpus", "8", "--write", str(layout), *words]) == 0
    said = capsys.readouterr().out
    assert (
        "algo.advantage.estimator is not set (a run then trains a critic too, by gae): planned "
        "with grpo" in said
    )
    assert "rollout.n_samples_per_prompt is not set (grpo compares" in said
    grpo = ["--algo.advantage.estimator", "grpo", "--rollout.n_samples_per_prompt", "8"]
    config = load_config([*model, *grpo, "--config", str(layout)], files=False)
    assert config.vllm.gpu_memory_utilization in SHARES and config.train.colocate_all == bool(words)
    assert plan.main([*model, "--gpus", "8", "--rollout.n_samples_per_prompt", "1"]) == 2
    assert "must be at least 2" in capsys.readouterr().err


def test_a_mixtures_plan_says_over_how_many_ranks_experts_are_dealt(tmp_path, capsys):
    layout = tmp_path / "layout.yaml"
    words = [
        "--actor.model_name_or_path",
        "Qwen/Qwen3-30B-A3B",
        "--train.colocate_all",
        "--ds.enable_sleep",
    ]
    words += [
        "--vllm.enable_sleep",
        "--train.dynamic_batch_enable",
        "--megatron.expert_parallel_size",
        "8",
    ]
    assert plan.main([*words, "--gpus", "16", "--write", str(layout)]) == 0
    said = capsys.readouterr().out
    (header,) = (line.split() for line in said.splitlines() if line.split()[:2] == ["TP", "PP"])
    assert header[:6] == ["TP", "PP", "VP", "CP", "EP", "DP"]
    assert "30,532,122,624 parameters (3,353,032,704 of them for a token), on 16 H100" in said
    assert "products of experts reach 0.5 of that rate" in said and "selective: moe" in said
    assert f"of {MIXTURE_ERROR.rows} steps of mixtures of experts that others published" in said
    assert f"(predicted / published {MIXTURE_ERROR.low:.2f} to {MIXTURE_ERROR.high:.2f})" in said
    assert yaml.safe_load(layout.read_text())["megatron"]["expert_parallel_size"] == 8


def test_a_share_that_leaves_no_room_is_named(capsys):
    assert plan.main([*QWEN25_7B, "--gpus", "8", "--vllm.gpu_memory_utilization", "0.98"]) == 2
    error = capsys.readouterr().err
    assert "bottleneck: the engines' share of a GPU (vllm.gpu_memory_utilization 0.98)" in error
    assert "leave vllm.gpu_memory_utilization out" in error


@pytest.mark.parametrize(
    ("model", "gpus", "words", "rule"),
    [
        (
            "qwen3-235b-a22b",
            "128",
            ("--vllm.tensor_parallel_size", "16"),
            "vllm.tensor_parallel_size must not exceed "
            "actor.num_gpus_per_node: an engine stays within a node; got 16 and 8",
        ),
        (
            "llama-3.1-8b",
            "32",
            ("--megatron.tensor_parallel_size", "16"),
            "megatron.tensor_parallel_size must not exceed "
            "actor.num_gpus_per_node: ranks that share a layer stay within a node; got 16 and 8",
        ),
        (
            "qwen2.5-7b",
            "8",
            ("--vllm.tensor_parallel_size", "3"),
            "vllm.tensor_parallel_size must divide the model's",
        ),
    ],
)
def test_where_no_layout_is_allowed_the_rule_is_named(model, gpus, words, rule, capsys):
    run = ("--actor.model_name_or_path", str(ROOT / "configs/models" / model), "--gpus", gpus)
    shared = ("--train.colocate_all", "--ds.enable_sleep", "--vllm.enable_sleep")
    assert plan.main([*run, *shared, *words]) == 2
    error = capsys.readouterr().err
    assert rule in error and "more GPUs" not in error and "another number" not in error


def test_nothing_fits_names_the_part_and_the_fewest_gpus(capsys):
    long = [
        "--data.max_len",
        "4096",
        "--gpus",
        "1",
        "--train.colocate_all",
        "--ds.enable_sleep",
        "--vllm.enable_sleep",
    ]
    assert (
        plan.main(
            [
                *QWEN25_7B,
                "--vllm.tensor_parallel_size",
                "1",
                "--actor.num_gpus_per_node",
                "4",
                *long,
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "nothing fits on 1 H100" in error and "optimizer is the largest part" in error
    assert re.search(r"the fewest H100 that would fit it: \d+", error)


SEVEN = ["--actor.model_name_or_path", "Qwen/Qwen2.5-7B", "--algo.advantage.estimator", "grpo"]
SEVEN += ["--rollout.n_samples_per_prompt", "8", "--data.max_len", "2048"]


@pytest.mark.parametrize(
    "given",
    [
        {"megatron.tensor_parallel_size": 4},
        {"megatron.pipeline_parallel_size": 2, "megatron.virtual_pipeline_size": 2},
        {"megatron.context_parallel_size": 2},
        {"megatron.recompute": "full"},
        {"vllm.tensor_parallel_size": 2},
        {"vllm.num_engines": 3, "vllm.tensor_parallel_size": 1},
        {"megatron.decoder_last_pipeline_num_layers": 12, "megatron.pipeline_parallel_size": 2},
        {"vllm.gpu_memory_utilization": 0.85},
        {"train.max_tokens_per_gpu": 7168, "train.dynamic_batch_enable": True},
        {"actor.num_nodes": 3},
    ],
    ids=lambda given: next(iter(given)).split(".")[1],
)
def test_a_size_on_the_command_line_is_kept(tmp_path, capsys, given):
    out = tmp_path / "plan.json"
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    gpus = (
        ("--actor.num_gpus_per_node", "2", "--gpus", "8")
        if "actor.num_nodes" in given
        else ("--gpus", "8")
    )
    assert plan.main([*SEVEN, *gpus, *words, "--json", str(out)]) == 0, capsys.readouterr().err
    layouts = json.loads(out.read_text())["layouts"]
    for name, value in given.items():
        found = {one["options"].get(name, value) for one in layouts}
        assert found == {value} and layouts, name
    kept = [
        name
        for name in given
        if name.startswith(("megatron", "vllm.t", "vllm.n", "train.max", "actor"))
    ]
    said = capsys.readouterr().out
    assert all(f"{name} {given[name]}" in said for name in kept), said
    assert "now: the layout as configured" not in said or "  now  " in said


def test_what_plan_does_not_use_is_said(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "megatron: {tensor_parallel_size: 8}\nds: {ring_attn_size: 2}\n"
    )
    assert (
        plan.main(
            [*SEVEN, "--config", str(tmp_path / "run.yaml"), "--gpus", "8", "--ds.deepcompile"]
        )
        == 0
    )
    said = capsys.readouterr().out
    unless = "unless the command line gives them: megatron.tensor_parallel_size 8"
    assert f"not used, because plan chooses them {unless}" in said
    assert "ds.ring_attn_size 2 is read as megatron.context_parallel_size 2" in said
    assert (
        "ds.deepcompile is not an option of the Megatron policy: DeepSpeed does not run the policy"
        in said
    )
    assert "now: the layout" not in said, "there is no such row: other GPUs are configured"


def levers(text: str) -> dict[str, str]:
    """What helps by what, of the lines after `what may help`."""
    lines = text.split("what may help")[1].split("\n\n")[0].splitlines()[1:]
    return {
        line[24:].split(" (")[0].strip(): line[2:24].strip()
        for line in lines
        if line.startswith("  ")
    }


def seconds(tmp_path: Path, *words: str) -> float:
    assert plan.main([*words, "--json", str(tmp_path / "one.json")]) == 0
    return min(
        one["seconds"]["step"] for one in json.loads((tmp_path / "one.json").read_text())["layouts"]
    )


def test_what_may_help_is_what_plan_finds_with_it(tmp_path, capsys):
    run = [*SEVEN, "--megatron.pipeline_parallel_size", "4"]
    assert plan.main([*run, "--gpus", "8"]) == 0
    found = levers(capsys.readouterr().out)
    shared = ["--train.colocate_all", "--ds.enable_sleep", "--vllm.enable_sleep"]
    dynamic = ["--train.dynamic_batch_enable"]
    tried = {
        "policy and engines on the same GPUs": [*run, *shared, "--gpus", "8"],
        "16 H100": [*run, "--gpus", "16"],
        "dynamic batches": [*run, *dynamic, "--gpus", "8"],
        "both": [*run, *shared, *dynamic, "--gpus", "8"],
        "adapters instead of all weights": [*run, "--ds.lora.rank", "16", "--gpus", "8"],
        "Adam's states in host memory": [*run, "--ds.adam_offload", "--gpus", "8"],
        "8 H200": [*run, "--gpus", "8", "--gpu", "H200"],
        "8 B200": [*run, "--gpus", "8", "--gpu", "B200"],
        "megatron.pipeline_parallel_size left to plan": [*SEVEN, "--gpus", "8"],
    }
    assert found.keys() == tried.keys()
    for what in (
        "policy and engines on the same GPUs",
        "adapters instead of all weights",
        "8 H200",
    ):
        words = tried[what]
        told = float(re.fullmatch(r"(?:fits|no gain), (\d+) s a step", found[what])[1])
        assert told == pytest.approx(seconds(tmp_path, *words), rel=0.1), what


def test_where_nothing_fits_it_says_what_closes_the_gap(capsys):
    run = ["--actor.model_name_or_path", "meta-llama/Llama-3.1-8B", *SEVEN[2:6], "--gpus", "4"]
    assert plan.main([*run, "--gpu", "A100-40"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("nothing fits on 4 A100-40 of 40.0 GiB")
        and "memory is 10.3 GiB short" in error
    )
    found = levers(error)
    assert found["policy and engines on the same GPUs"] == "0.1 GiB short"
    assert found["adapters instead of all weights"].startswith("fits, ") and found[
        "8 A100-40"
    ].startswith("fits, ")
    assert found["Adam's states in host memory"].startswith("fits, ")
    assert plan.main([*run, "--gpu", "A100-40", "--ds.lora.rank", "16"]) == 0


PPO = ["--config", str(ROOT / "configs/recipes/gsm8k_ppo.yaml"), *QWEN25_7B[2:], "--gpus", "8"]


def configured(out: Path, *words: str) -> dict:
    assert plan.main([*PPO, *words, "--json", str(out)]) == 0
    return json.loads(out.read_text())["configured"]


def test_a_critic_takes_memory_and_seconds(tmp_path, capsys):
    """On GPUs of its own it must fit there, and the slower model makes the step; on shared ones
    they take turns."""
    beside = configured(tmp_path / "1")
    assert "with a critic beside the policy" in capsys.readouterr().out
    policy, critic = (
        beside["memory"][doing]["optimizer"] for doing in ("training", "training the critic")
    )
    assert policy - critic == pytest.approx(12 * 152_064 * 3584 / 2, rel=1e-3), (
        "one value for each of half the logits"
    )
    larger = ("--critic.megatron.tensor_parallel_size", "1")
    assert configured(tmp_path / "2", *larger)["seconds"] is None, (
        "the critic's states on one GPU do not fit"
    )
    assert "while training the critic" in capsys.readouterr().out
    turns = (
        "--train.colocate_all",
        "--ds.enable_sleep",
        "--vllm.enable_sleep",
        "--vllm.num_engines",
        "2",
    )
    shared = configured(tmp_path / "3", *turns, "--gpus", "2")
    assert "one after the other" in capsys.readouterr().out
    assert shared["memory"]["training the critic"]["optimizer"] == critic, (
        "only one of the two is awake"
    )
    for phase in ("logprobs", "train"):
        assert shared["seconds"][phase] > beside["seconds"][phase] > 0


def test_a_sync_of_adapters_counts_what_a_rank_really_sends(tmp_path, capsys):
    """In bytes, seconds and buffers; merged ones travel as all weights do."""
    make_tiny_policy(tmp_path / "model")
    case = {"model": str(tmp_path / "model"), "engines": "bf16", "rank": 8}
    batch, weights_N = make_batch(61)
    arguments = {"cases": [case], "batch": batch, "weights_N": weights_N, "root": tmp_path}
    ((rank,),) = launch("tests.megatron.layers.lora_ranks", "run_others", 1, **arguments)
    sent = sum(tensor.nbytes for tensor in rank["sent"].values())
    weights = sum(
        tensor.numel() for tensor in load_file(tmp_path / "model/model.safetensors").values()
    )

    found = {}
    for lora in ("adapter", "merged"):
        words = [
            "--actor.model_name_or_path",
            case["model"],
            "--ds.lora.rank",
            "8",
            "--vllm.lora",
            lora,
        ]
        words += ["--data.max_len", "128", "--gpus", "2", "--json", str(tmp_path / f"{lora}.json")]
        assert plan.main(words) == 0, capsys.readouterr().err
        found[lora] = json.loads((tmp_path / f"{lora}.json").read_text())
    for lora, size in (("adapter", sent), ("merged", 2 * weights)):
        assert found[lora]["weight_sync_bytes"] == size
        assert (
            found[lora]["layouts"][0]["memory"]["sampling"]["buffers of the weight sync"]
            == 2 * size
        )
    assert found["adapter"]["disk"]["the final one in Hugging Face format"] == 2 * sent, "in fp32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H1000"], "--gpu must be one of A100, A100-40, A800, "),
        (
            ["--gpu", "V100"],
            "got V100; for another card, give the closest one, and its memory as megatron.gpu_mem",
        ),
        (["--actor.model_name_or_path", "org/name"], "configs/models"),
        (["--actor.no_such_option", "1"], "actor.no_such_option"),
    ],
)
def test_bad_arguments_are_refused(words, message, capsys):
    assert plan.main([*QWEN25_7B, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_layouts_hold(layout: Path, monkeypatch, capsys):
    """Loaded on top of the recipe that their first lines name; every distinct rank is built."""
    monkeypatch.chdir(ROOT)
    command = next(line for line in layout.read_text().splitlines() if "openrlhf-ext plan" in line)
    _, words = plan._parse(shlex.split(command.partition("openrlhf-ext plan ")[2]))
    config = load_config([*words, "--config", str(layout)], files=False)
    assert (
        yaml.safe_load(layout.read_text())["megatron"]["tensor_parallel_size"]
        == config.layout.tensor_parallel_size
    )
    assert dry_run(config) == 0
    assert "every parameter of every rank is filled exactly once" in capsys.readouterr().out


def test_the_guides_commands_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/scaling.md").read_text()
    commands = re.findall(r"^openrlhf-ext plan (.*)$", text, re.M)
    assert [plan.main(shlex.split(command)) for command in commands] == [0, 2]
    assert "the fewest H100 that would fit it:" in capsys.readouterr().err


def test_published_steps_are_fitted_on_a_third_and_judged_by_the_rest(monkeypatch, capsys):
    """The command on the committed rows: the record has its numbers, plan its constants, and the
    guide what it says."""
    seen = []

    def spied(rows, start):
        seen.extend(one.row["id"] for one in rows)
        return fit(rows, start)

    monkeypatch.setattr(benchmark, "fit", spied)
    monkeypatch.setattr(sys, "argv", ["plan.py", "--published"])
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    names = sorted(row["id"] for row in json.loads(benchmark.ROWS.read_text())["rows"])
    mixtures = [name for name in names if "-a3b " in name or "-a22b " in name]
    dense = [name for name in names if name not in mixtures]
    assert (
        seen == dense[::3] == [row["id"] for row in found["rows"] if row["fitted"]]
        and len(mixtures) == 8
    )
    assert found == record.load("plan_cpu.json")["published"], "python benchmarks/plan.py --output"
    assert {name: getattr(Assumptions(), name) for name in benchmark.FITTED} == found["constants"]
    step, former = found["error"]["step"], found["former"]["step"]
    assert (
        dataclasses.asdict(STEP_ERROR) == step
        and dataclasses.asdict(MIXTURE_ERROR) == found["mixtures"]
    )
    assert step["median"] < former["median"] and step["worst"] < former["worst"], (
        "the fitted ones are the better ones"
    )
    assert sum("step" in row["ratio"] for row in found["rows"]) >= 15


def test_every_published_row_names_its_source_and_what_it_does_not_tell():
    rows = json.loads(benchmark.ROWS.read_text())["rows"]
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    for row in rows:
        assert re.search(r" at [0-9a-f]{8}|docs\.nvidia\.com", row["source"]) and row["assumed"], (
            row["id"]
        )
        assert set(row["seconds"]) <= set(benchmark.KINDS) and min(row["seconds"].values()) > 0


def test_a_plan_says_how_far_off_it_is(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan.main([*QWEN25_7B, "--gpus", "8", "--json", str(out)]) == 0
    error = f"within a factor of {STEP_ERROR.median:.2f}, the worst by {STEP_ERROR.worst:.2f}"
    said = capsys.readouterr().out
    assert error in said and f"of {STEP_ERROR.rows} steps of dense models" in said
    assert json.loads(out.read_text())["step_error"] == dataclasses.asdict(STEP_ERROR)
