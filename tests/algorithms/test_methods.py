"""A method is one file: dropped into the folder it is an estimator of the package, beside it one of
the user's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf_ext
from benchmarks import harness, option_tables
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
METHOD = '''
"""`leave_one_out`: A. Ahmadian et al., "Back to Basics", arXiv 2402.14740."""

from openrlhf_ext.algorithms import Inputs, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.option_blocks import ClipOptions, Degenerate, PartitionOptions, ScopeOptions
from openrlhf_ext.algorithms.option_blocks import TruncationOptions, degenerate


class LeaveOneOutOptions(PartitionOptions, TruncationOptions, ClipOptions, ScopeOptions):
    pull: float = option(1.0, "factor of every advantage", gt=0)
    degenerate: Degenerate = degenerate("literal")


@register_algorithm("leave_one_out", LeaveOneOutOptions)
class LeaveOneOut(TokenAlgorithm):
    """RLOO: a completion's reward is compared with the mean of the others of its group.

        A_i = pull (r_i - mean of r_k over k != i)
    """

    def advantages(self, inputs: Inputs):
        groups, r_B = inputs.groups, inputs.batch.rewards
        others_B = (groups.sizes_B - 1).clamp(min=1)
        a_B = self.options.pull * (r_B - (groups.sum(r_B)[groups.index_B] - r_B) / others_B)
        return {"advantages": inputs.segments.spread(a_B.to(inputs.batch.float_dtype)), "exposed": {"A": a_B}}
'''
# What the copy of the package with one more file says and does.
SCRIPT = """
import sys
from openrlhf_ext.config import build_config
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.config.show import format_help

estimator, *own = sys.argv[1:]
assert f" + --algo.{estimator}.<key>" in format_help("algo")
assert "torch" not in sys.modules, "what is listed is not imported"
assert f"--algo.{estimator}.pull  <number > 0>" in format_help(f"algo.{estimator}", *own)
from benchmarks.option_tables import format_markdown

in_table = "| `pull` | number > 0 (`1`) | leave_one_out | factor of every advantage |" in format_markdown()
assert in_table == (estimator != "custom")

import torch
from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.trial import try_algorithm

values = {"actor.model_name_or_path": "org/m", "data.prompt_dataset": "org/d", "reward.remote_url": "r.py"}
values |= {"rollout.n_samples_per_prompt": 4, "algo.advantage.estimator": estimator, f"algo.{estimator}.pull": 0.5}
values |= {"algo.module_path": file for file in own}
name, options, _ = algorithm_options(build_config(values, files=False))
assert name == "leave_one_out" and options["pull"] == 0.5
algorithm = get_algorithm(name, **options)
assert try_algorithm(algorithm, 4).startswith("3 made groups of 4: advantages -0.333 to 0.333")

logits, rows = torch.zeros(2, requires_grad=True), torch.arange(8)  # a policy of two tokens, of which one is right
for _ in range(30):
    logprobs = logits.log_softmax(0)[rows % 2]
    shaped = algorithm.shape(RolloutBatch(
        tokens=rows % 2, lengths=torch.ones(8, dtype=torch.long), rewards=(rows % 2).double(), group_ids=rows // 4,
        old_logprobs=logprobs.detach(),
    ))
    (gradient,) = torch.autograd.grad(algorithm.loss(logprobs, shaped).value, logits)
    logits.data -= gradient
assert logits.softmax(0)[1] > 0.9

from openrlhf_ext.cli.explain import main
assert main(["--algorithm", name, "--rollouts", "rollouts.jsonl"]) == 0
"""


@pytest.mark.parametrize("estimator", ["leave_one_out", "custom"])
def test_one_file_is_a_method(tmp_path, estimator):
    """In help, options, documentation, `explain`, and the loop of shaping and loss."""
    assert METHOD.count("\n") < 60
    package = tmp_path / "openrlhf_ext"
    shutil.copytree(
        Path(openrlhf_ext.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "benchmarks").mkdir()
    for program in (harness, option_tables):
        shutil.copy(program.__file__, tmp_path / "benchmarks")
    folder = package / "algorithms/methods" if estimator != "custom" else tmp_path
    (folder / "leave_one_out.py").write_text(METHOD)
    shutil.copy(ROOT / "examples/data/explain_rollouts.jsonl", tmp_path / "rollouts.jsonl")
    own = [str(folder / "leave_one_out.py")] if estimator == "custom" else []
    command, environment = (
        [sys.executable, "-c", SCRIPT, estimator, *own],
        os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (
        run.stdout.startswith("leave_one_out, group ")
        and "compared with the mean of the others" in run.stdout
    )
