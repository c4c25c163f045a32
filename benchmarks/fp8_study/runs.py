"""A small random policy that is trained in FP8, rolled out in FP8, or both: by the command that
users start, and how far trainer and engine are apart by the emulation of both."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.kit import Machine

ROOT = Path(__file__).resolve().parents[2]
RUNS: dict[str, tuple[str, ...]] = {
    "none": (),
    "engines": ("fp8.rollout_enable",),
    "blockwise": ("fp8.enable", "fp8.rollout_enable"),
    "current": ("fp8.enable", "fp8.rollout_enable", "fp8.recipe=current"),
    "delayed": ("fp8.enable", "fp8.rollout_enable", "fp8.recipe=delayed"),
    "current_mlp": ("fp8.enable", "fp8.recipe=current", "fp8.modules=mlp"),
}
_REWARD = """
def reward_func(queries, prompts, labels):
    completion = queries[0][len(prompts[0]):]
    return {"rewards": sum(c.isalnum() for c in completion) / max(1, len(completion)), "scores": 0.0, "extra_logs": {}}
"""
_TO_END_S = 10.0
_GAUGES = ("kl/rollout", "mismatch/mean_abs")


def whole_step(machine: Machine, way: str, study: dict[str, Any]) -> dict[str, Any]:
    """Some steps of ``train_ppo_ray``, policy and engine taking turns where there is a GPU.

    Returns:
        Seconds of the last step and of its phases, and over all steps the means of the gauges that
        say how far policy and engines are apart.

    Raises:
        RuntimeError: the run ended badly; the text has the end of its output.
    """
    settings = study["run"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _policy(folder / "policy", study)
        questions = [
            {"question": f"{i} + {i + 1} = ", "answer": str(2 * i + 1)}
            for i in range(settings["prompts"])
        ]
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in questions * settings["steps"])
        )
        (folder / "reward.py").write_text(_REWARD)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "openrlhf_ext.cli.train_ppo_ray",
                *_options(machine, way, folder, settings),
            ],
            cwd=ROOT,
            timeout=machine.seconds - _TO_END_S,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout[-3000:]}")
        records = [
            json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
        ]
    steps = [record for record in records if "time/step" in record]
    phases = {
        name.partition("/")[2]: value
        for name, value in steps[-1].items()
        if name.startswith("time/")
    }
    gauges = {name: sum(step[name] for step in steps) / len(steps) for name in _GAUGES}
    return {
        "label": steps[-1].get("label", ""),
        "steps": len(steps),
        "last_step_seconds": phases,
        **gauges,
    }


def _options(machine: Machine, way: str, folder: Path, settings: dict[str, Any]) -> list[str]:
    samples = settings["prompts"] * settings["samples"]
    options = {
        "actor.model_name_or_path": folder / "policy",
        "actor.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "algo.advantage.estimator": "grpo",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 64 + settings["new_tokens"],
        "rollout.batch_size": settings["prompts"],
        "rollout.n_samples_per_prompt": settings["samples"],
        "rollout.max_new_tokens": settings["new_tokens"],
        "rollout.micro_batch_size": 16,
        "train.batch_size": samples,
        "train.micro_batch_size": 16,
        "reward.remote_url": folder / "reward.py",
        "ckpt.output_dir": folder / "out",
        "ckpt.path": folder / "checkpoints",
        "megatron.param_dtype": "bf16" if machine.on_gpu else "fp32",
    }
    options |= {
        name: value or "true" for name, _, value in (word.partition("=") for word in RUNS[way])
    }
    if machine.on_gpu:
        options |= {
            "train.colocate_all": "true",
            "ds.enable_sleep": "true",
            "vllm.enable_sleep": "true",
            "vllm.gpu_memory_utilization": 0.3,
        }
    elif "fp8.enable" in RUNS[way]:
        options["fp8.emulate"] = "true"
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def mismatch(machine: Machine, study: dict[str, Any]) -> dict[str, Any]:
    """Emulated on both sides, anywhere: what the model itself has sampled, every trainer beside
    both engines."""
    from transformers import AutoModelForCausalLM

    from benchmarks.fp8_study.mismatch import Completion, measure

    settings = study["run"]
    dtype = torch.bfloat16 if machine.on_gpu else torch.float32
    plain = "bf16" if machine.on_gpu else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        _policy(Path(folder), study)

        def load(dtype: torch.dtype) -> Any:
            return (
                AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(machine.device).eval()
            )

        torch.manual_seed(0)
        model, prompt = load(dtype), 8
        ids = torch.randint(2, 200, (settings["prompts"], prompt), device=machine.device)
        new = settings["new_tokens"]
        tokens = model.generate(
            ids, do_sample=True, top_k=0, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )
        completions = [Completion(row[:prompt], row[prompt:]) for row in tokens.tolist()]
        del model
        ways = [plain, *study["recipes"]]
        found = measure(load, completions, trainer=ways, rollout=[plain, "blockwise"], dtype=dtype)
    return found.to_json()


def _policy(folder: Path, study: dict[str, Any]) -> None:
    from tests.models import make_tiny_policy

    sizes = study["run"]
    make_tiny_policy(
        folder,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
    )
