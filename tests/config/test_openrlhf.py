"""The contract with OpenRLHF 0.11.2: its drift and ours are seen here, option by option."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_ext.config import load_config, option_table
from openrlhf_ext.config.upstream import DIFFERENCES, upstream_args
from openrlhf_ext.options import value_of, value_text

pytest.importorskip("openrlhf", reason="compares with the installed OpenRLHF")

from tests.config.conftest import MODEL  # noqa: E402
from tests.config.upstream_parser import upstream_parser  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    return {
        action.option_strings[0].removeprefix("--"): action
        for action in upstream_parser()._actions
        if action.dest != "help"
    }


def test_every_option_of_openrlhf_is_known_and_only_those_count_as_its_own(actions):
    assert len(actions) == 167
    assert {name for name, option in option_table().items() if not option.info.added} == set(
        actions
    )


def test_defaults_differ_only_where_documented(actions):
    def plain(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    changed = {
        name
        for name, action in actions.items()
        if plain(action.default) != option_table()[name].default and name != "logger.wandb.run_name"
    }
    # a second flag for muon.nesterov
    changed -= {"actor.muon.no_nesterov", "critic.muon.no_nesterov"}
    assert changed <= {difference.name for difference in DIFFERENCES}
    assert changed == {
        "algo.kl.init_coef",
        "vllm.num_engines",
        "vllm.sync_backend",
        "vllm.gpu_memory_utilization",
        "reward.clip_range",
        "ds.packing_samples",
        "eval.split",
    }


def test_choices_differ_only_where_documented(actions):
    changed = {
        name
        for name, action in actions.items()
        if tuple(action.choices or ()) != option_table()[name].choices
    }
    assert changed == {
        "algo.advantage.estimator",
        "actor.lr_scheduler",
        "critic.lr_scheduler",
        "vllm.sync_backend",
    }
    assert changed <= {difference.name for difference in DIFFERENCES}


def test_numbers_of_values_agree(actions):
    expected = {"*": "many", "+": "many", 2: "pair", None: "one", 0: "flag"}
    for name, action in actions.items():
        assert option_table()[name].arity == expected[action.nargs], name


def test_types_agree(actions):
    words = {int: "integer", float: "number", str: "text"}
    for name, action in actions.items():
        option = option_table()[name]
        if action.type is not None and not option.choices:
            assert words[action.type] in option.expects, name


def names_of(namespace: SimpleNamespace, prefix: str = "") -> set[str]:
    names = set()
    for name, value in vars(namespace).items():
        inner = isinstance(value, SimpleNamespace)
        names |= names_of(value, f"{prefix}{name}.") if inner else {prefix + name}
    return names


def test_the_namespace_holds_what_openrlhf_parses(load):
    parsed = vars(upstream_parser().parse_args([]))
    assert names_of(upstream_args(load())) == set(parsed)


def test_the_namespace_carries_the_values(load):
    args = upstream_args(
        load("--train.seed", "7", "--actor.adam.betas", "0.8", "0.9", "--data.max_len", "128")
    )
    assert (args.train.seed, args.actor.adam.betas, args.data.max_len) == (7, (0.8, 0.9), 128)
    assert args.actor.muon.nesterov is True
    # DeepspeedStrategy refuses anything else with ds.tensor_parallel_size > 1
    assert args.ds.param_dtype == "bf16"
    assert args.algo.kl.init_coef == 0


def test_the_namespace_is_fixed_up_as_openrlhf_does(load, run_dir):
    args = upstream_args(load("--megatron.tensor_parallel_size", "2"))
    assert (args.ds.tensor_parallel_size, args.ds.ring_attn_size) == (2, 1)
    args = upstream_args(
        load(
            "--actor.num_gpus_per_node",
            "4",
            "--megatron.tensor_parallel_size",
            "2",
            "--megatron.pipeline_parallel_size",
            "2",
        )
    )
    assert args.ds.tensor_parallel_size == 4
    assert args.actor.eps_clip_low_high == (0.2, 0.2)
    assert args.reward.remote_url == [str(run_dir / "reward.py")]
    assert args.rollout.vllm_generate_batch_size == 8
    assert args.critic.model_name_or_path is None
    # so that the engines' log-probs are recorded
    assert args.algo.advantage.is_correction_level == "token"
    assert args.algo.advantage.is_correction_threshold == [0.5, 5.0]
    assert args.reward.overlong_buffer_len is None
    (run_dir / "agent.py").write_text("class AgentExecutor: ...\n")
    agent = upstream_args(
        load("--reward.remote_url", "null", "--train.agent_func_path", "agent.py")
    )
    assert agent.reward.remote_url == ["agent"]


def test_loading_twice_gives_independent_namespaces(load):
    config = load()
    upstream_args(config).eval.steps = float("inf")  # OpenRLHF's trainer does this
    assert upstream_args(config).eval.steps == -1


def test_the_script_of_the_migration_guide_comes_to_what_openrlhf_parses(run_dir):
    """Every option has the value that OpenRLHF gives it, or a line or the table of other defaults
    names it."""
    block = (
        (ROOT / "docs/migration.md")
        .read_text()
        .split("as a dry run -->\n```bash\n")[1]
        .split("```")[0]
    )
    text = block.removeprefix("python -m openrlhf_ext.cli.train_ppo_ray")
    files = {
        "OpenRLHF/Llama-3-8b-sft-mixture": "model",
        "OpenRLHF/prompt-collection-v0.1": "train.jsonl",
        "/openrlhf/examples/python/reward_func.py": "reward.py",
    }
    given = {name: str(run_dir / file) for name, file in files.items()}
    words = [given.get(word, word) for word in shlex.split(text.replace("\\\n", " "))]
    (run_dir / "model/config.json").write_text(
        json.dumps(MODEL | {"max_position_embeddings": 2048})
    )
    config = load_config(words, files=False)
    # a name of 0.11.0
    theirs = [word for word in words if word != "--algo.advantage.is_correction_enable"]
    said = " ".join(config.warnings) + " ".join(difference.name for difference in DIFFERENCES)
    parsed = vars(upstream_parser().parse_args(theirs))
    del parsed["logger.wandb.run_name"]  # the time
    differ = {
        name: (value, value_of(config, name))
        for name, value in parsed.items()
        if name in option_table() and value_text(value) != value_text(value_of(config, name))
    }
    assert {name: pair for name, pair in differ.items() if name not in said} == {}
