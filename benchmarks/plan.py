"""What plan predicts beside what others published, and how long it takes to rank 64 GPUs.

    OMP_NUM_THREADS=2 python benchmarks/plan.py --output benchmarks/results/plan_cpu.json

* `published`: Qwen3-32B, GRPO, on policy, 32 H100: NeMo-RL v0.5.0 states 376 s a step
  (docs/about/performance-summary.md; 2,048 samples, train batch 512, at most 4,096 tokens, 3,251 on average,
  engines of 4 GPUs, TP 4, PP 4). 571 tokens/s/GPU
  make 3,354 tokens a sample, so prompts of 103. Assumptions of plan are its defaults: none was fitted to this number.
* `ranking`: seconds of ranking the 32B recipe on 64 H100.
* `formula`: Megatron-LM's own estimate (`megatron/training/theoretical_memory_usage.py`, core_v0.16.1) of
  Qwen2.5-32B, with what it lacks listed beside it as plan counts it, bytes of one layer for 4,096 tokens on one rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.config import load_config
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.tools.plan.memory import GIB, Pass, StateOptions, layer_activations, rank_states
from openrlhf_ext.tools.plan.search import Planner

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PUBLISHED_S = 376
NEMO_RL = """
--actor.num_nodes 4 --actor.num_gpus_per_node 8 --train.colocate_all --ds.enable_sleep --vllm.enable_sleep
--megatron.tensor_parallel_size 4 --megatron.pipeline_parallel_size 4 --megatron.sequence_parallel_enable
--vllm.num_engines 8 --vllm.tensor_parallel_size 4 --vllm.gpu_memory_utilization 0.6
--rollout.batch_size 64 --rollout.n_samples_per_prompt 32 --rollout.max_new_tokens 3968 --data.max_len 4096
--train.batch_size 512 --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192
--algo.advantage.estimator grpo --algo.kl.init_coef 0.01 --algo.kl.use_loss
""".split()


def published() -> dict[str, Any]:
    """Plan's seconds of the published step, and their ratio to it."""
    config = load_config(["--actor.model_name_or_path", str(CONFIGS / "models/qwen3-32b"), *NEMO_RL], files=False)
    planner = Planner(config, response_tokens=3251, prompt_tokens=103)
    seconds = planner.as_configured().seconds
    assert seconds is not None
    return {
        "published_s": PUBLISHED_S,
        "predicted_s": round(seconds.step, 1),
        "ratio": round(seconds.step / PUBLISHED_S, 3),
        "phases": {name: round(value, 1) for name, value in dataclasses.asdict(seconds).items()},
        "assumptions": planner.clock.lines(),
    }


def formula(shape: ModelShape, tp: int, pp: int, dp: int, tokens: int) -> dict[str, float]:
    """Parameters (billions) and GiB of the most loaded rank, by Megatron-LM's published formula; micro-batches of 1,
    sequence parallelism, selective recomputation, no interleaving, as many micro-batches as stages."""
    h, f, layers, vocab = shape.hidden_size, shape.ffn_hidden_size, shape.num_layers, shape.vocab_size
    layer = 2 * h * (1.5 * f + 1) + 2 * h * h * (1 + shape.num_kv_heads / shape.num_heads)
    shard = ((layers * layer + h) / pp + vocab * h * (2 if pp == 1 else 1)) / tp
    kept = tokens * h * (18 + 4 * f / h) * layers + 8 * tokens * pp + tokens * h * pp
    kept += 4 * tokens * h * (1 + vocab / h) if pp == 1 else 0
    return {"shard": shard / 1e9, "states": shard * (6 + 12 / dp) / GIB, "activations": kept / tp / GIB}


def corrections(shape: ModelShape) -> dict[str, Any]:
    """What the formula lacks, by plan's own counts."""
    tokens, alone = 4096, ParallelLayout(1)
    sbh = tokens * shape.hidden_size
    layer = layer_activations(shape, alone, Pass(tokens, tokens))
    fp8 = layer_activations(shape, alone, Pass(tokens, tokens, fp8=True))
    formulas = 18 + 4 * shape.ffn_hidden_size / shape.hidden_size
    saved = round((fp8.total - layer.total) / sbh, 2)
    return {
        "layer, bytes per token and hidden entry": round(layer.total / sbh, 2),
        "the formula's": round(formulas, 2),
        "full recomputation, GiB a layer": round(layer.input / GIB, 3),
        "linear inputs in FP8, bytes per token and hidden entry": saved,
        "parameters": rank_states(shape, alone, 0, StateOptions()).parameters,
    }


TABLE = (
    (8, 1, 1), (4, 2, 1), (8, 1, 2), (4, 4, 1), (8, 2, 1), (4, 4, 2), (8, 2, 2), (8, 4, 1),
    (4, 2, 8), (8, 2, 4), (4, 8, 2),
)  # fmt: skip
"""Tensor-parallel size, stages, copies."""


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    shape = read_model_shape(CONFIGS / "models/qwen2.5-32b")
    words = ["--config", str(CONFIGS / "recipes/qwen2.5_32b_gtpo_entropy.yaml")]
    words += ["--actor.model_name_or_path", str(CONFIGS / "models/qwen2.5-32b")]
    planner, started = Planner(load_config(words, files=False)), time.perf_counter()
    found = planner.candidates(64)
    ranking = {"gpus": 64, "layouts": len(found), "seconds": round(time.perf_counter() - started, 1)}
    rows = {f"{tp}.{pp}.{dp}": formula(shape, tp, pp, dp, 4096) for tp, pp, dp in TABLE}
    result = {
        **record.environment(),
        "published": published(),
        "ranking": ranking,
        "formula": {name: {key: round(value, 3) for key, value in row.items()} for name, row in rows.items()},
        "corrections": corrections(shape),
    }
    record.write(output, result)


if __name__ == "__main__":
    main()
