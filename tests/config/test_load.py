from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.config import ConfigError, Findings, RunConfig, Violation, load_config
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.options.table import OptionTable
from tests.patience import PATIENCE_S

HEAVY = ("torch", "transformers", "ray", "openrlhf", "vllm", "megatron", "datasets", "numpy")


def test_values_are_typed_and_nested(load):
    config = load(
        "--actor.adam.lr", "1e-5", "--actor.adam.betas", "0.9", "0.99", "--vllm.enforce_eager"
    )
    assert config.actor.adam.lr == 1e-5
    assert config.actor.adam.betas == (0.9, 0.99)
    assert config.vllm.enforce_eager is True
    assert config.rollout.batch_size == 8
    assert config.train.seed == 42


def test_precedence_is_defaults_then_files_in_order_then_command_line(run_dir: Path):
    (run_dir / "a.yaml").write_text("train.seed: 1\ndata.max_samples: 100\nrollout.timeout_s: 5\n")
    (run_dir / "b.yaml").write_text("train:\n  seed: 2\ndata.max_samples: 200\n")
    config = load_config(
        ["--config", "run.yaml", "--config", "a.yaml", "b.yaml", "--train.seed", "3"]
    )
    assert (config.train.seed, config.data.max_samples, config.rollout.timeout_s) == (3, 200, 5)
    assert config.sources["train.seed"] == "command line"
    assert config.sources["data.max_samples"] == "b.yaml:3"


def test_a_name_given_twice_on_the_command_line_takes_the_last_value(load):
    assert load("--train.seed", "1", "--train.seed=2").train.seed == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], True), (["true"], True), (["false"], False)],
)
def test_flags_may_stand_bare_or_with_a_value(load, words, expected):
    assert (
        load(
            "--megatron.distributed_optimizer_enable", *words
        ).megatron.distributed_optimizer_enable
        is expected
    )
    assert (
        load("--no-megatron.distributed_optimizer_enable").megatron.distributed_optimizer_enable
        is False
    )


def test_null_unsets_an_option_of_a_file(run_dir: Path, load):
    (run_dir / "run.yaml").write_text((run_dir / "run.yaml").read_text() + "actor.dual_clip: 3\n")
    assert load().actor.dual_clip == 3
    assert load("--actor.dual_clip", "null").actor.dual_clip is None


def test_negative_numbers_are_values(load):
    assert load("--reward.failure_value", "-1").reward.failure_value == -1


def test_yaml_scalars_mean_what_they_say(run_dir: Path, load):
    """PyYAML's YAML 1.1 would read off and on as booleans, 1e-5 as text and 010 as eight."""
    (run_dir / "more.yaml").write_text(
        "algo.advantage:\n  is_correction_level: off\n  estimator: gtpo_entropy\n"
        "algo.gtpo_entropy:\n  length_penalty: {kind: dapo, on: correct, l_max: 64, l_cache: "
        "010}\n  adv_eps: 1e-5\nactor.adam.lr: 1e-6\n"
    )
    config = load("--config", "more.yaml")
    assert config.algo.advantage.is_correction_level == "off"
    assert config.algo.gtpo_entropy == {
        "length_penalty": {"kind": "dapo", "on": "correct", "l_max": 64, "l_cache": 10},
        "adv_eps": 1e-5,
    }
    assert config.actor.adam.lr == 1e-6


def test_options_of_an_estimator_merge_leaf_by_leaf(run_dir: Path, load):
    (run_dir / "more.yaml").write_text(
        "algo.dapo: {length_penalty: {kind: dapo, l_max: 64, l_cache: 8}, clip_high: 0.3}\n"
    )
    config = load(
        "--config",
        "more.yaml",
        "--algo.dapo.length_penalty.l_cache",
        "16",
        "--algo.dapo.mask_truncated",
    )
    assert config.algo.dapo["length_penalty"] == {"kind": "dapo", "l_max": 64, "l_cache": 16}
    assert config.algo.dapo["mask_truncated"] is True
    config = load("--config", "more.yaml", "--algo.dapo.length_penalty", "null")
    assert config.algo.dapo == {"length_penalty": None, "clip_high": 0.3}
    config = load(
        "--algo.dapo.length_penalty",
        "{kind: dapo, l_max: 9}",
        "--algo.dapo.entropy_clamp",
        "0.1",
        "2",
    )
    assert config.algo.dapo == {
        "length_penalty": {"kind": "dapo", "l_max": 9},
        "entropy_clamp": [0.1, 2],
    }


def test_an_empty_section_of_a_file_sets_nothing(run_dir: Path, load):
    (run_dir / "more.yaml").write_text("logger:\nalgo:\n  dapo:\n  # clip_high: 0.3\n")
    assert load("--config", "more.yaml").algo.dapo == {}


def test_relative_paths_are_resolved_and_names_and_urls_are_kept(load, run_dir: Path):
    config = load("--eval.dataset", "org/set,train.jsonl", "--logger.tensorboard_dir", "tb")
    assert config.actor.model_name_or_path == str(run_dir / "model")
    assert config.eval.dataset == f"org/set,{run_dir / 'train.jsonl'}"
    assert config.logger.tensorboard_dir == str(run_dir / "tb")
    assert config.ckpt.output_dir == str(run_dir / "ckpt")
    urls = "http://a:1/get,https://b/get"
    assert load("--reward.remote_url", urls).reward.remote_url == urls


def test_metrics_and_figure_default_to_the_output_folder(load, run_dir: Path):
    config = load("--ckpt.output_dir", "out")
    assert config.logger.metrics_path == str(run_dir / "out/metrics.jsonl")
    assert config.logger.figure_path == str(run_dir / "out/training.png")
    assert load("--logger.metrics_path", "m.jsonl").logger.metrics_path == str(run_dir / "m.jsonl")


def test_gradient_checkpointing_is_recompute(load, problems):
    assert load("--actor.gradient_checkpointing_enable", "yes").megatron.recompute == "full"
    assert load().megatron.recompute == "none"
    (message,) = problems("--actor.gradient_checkpointing_enable", "--megatron.recompute", "none")
    assert "actor.gradient_checkpointing_enable" in message and "megatron.recompute" in message


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--train.batchsize", "train.batch_size"),
        ("--algo.gtpo_entrop.alpha2", "algo.gtpo_entropy.alpha2"),
        ("--megatron.tensor_model_parallel_size", "megatron.tensor_parallel_size"),
        ("--lr", "actor.adam.lr"),
        ("--actor.learning_rate", "actor.adam.lr"),
        ("--critic.learning_rate", "critic.adam.lr"),
    ],
)
def test_unknown_names_are_rejected_with_the_nearest_one(problems, word, nearest):
    assert problems(word, "1") == [
        f"unknown option {word.removeprefix('--')} (command line); did you mean {nearest}?"
    ]


def test_unknown_and_wrong_values_of_a_file_name_file_and_line(run_dir: Path, problems):
    (run_dir / "bad.yaml").write_text(
        "train:\n  sead: 1\n  seed: one\nzzz: 3\nactor: 4\nrollout.top_p: 0\n"
    )
    assert problems("--config", "bad.yaml") == [
        "unknown option train.sead (bad.yaml:2); did you mean train.seed?",
        "unknown option zzz (bad.yaml:4); --help lists all options",
        "actor is a group of options: give one of actor.* (bad.yaml:5)",
        "rollout.top_p: expected number > 0 and <= 1, got 0 (bad.yaml:6)",
        "train.seed: expected integer >= 0 and <= 2147483647, got one (bad.yaml:3)",
    ]


def test_a_wrong_value_is_reported_where_it_stands(problems):
    assert problems(
        "--train.seed", "one", "--eval.steps", "0", "--megatron.param_dtype", "bfloat16"
    ) == [
        "megatron.param_dtype: expected one of bf16, fp32, got bfloat16 (command line); did you "
        "mean bf16?",
        "train.seed: expected integer >= 0 and <= 2147483647, got one (command line)",
        "eval.steps: expected integer >= 1, or -1, got 0 (command line)",
    ]


@pytest.mark.parametrize(
    "option", ["data.prompt_dataset", "eval.dataset", "ckpt.output_dir", "reward.remote_url"]
)
def test_an_empty_path_is_not_the_current_directory(problems, option):
    assert problems(f"--{option}", "") == [
        f"{option} must not be or contain an empty path: got '' (command line); leave it out"
    ]


def test_none_of_several_paths_is_empty_and_a_value_that_was_replaced_does_not_count(problems):
    (message,) = problems("--data.prompt_dataset", "train.jsonl,")
    assert message.startswith("data.prompt_dataset must not be or contain an empty path: got")
    assert problems("--data.prompt_dataset", "", "--data.prompt_dataset", "train.jsonl") == []


def test_the_number_of_values_is_checked(problems):
    assert problems(
        "--actor.eps_clip_low_high", "0.2", "--train.seed", "--data.max_len", "100", "200"
    ) == [
        "--actor.eps_clip_low_high takes 2 values (2 numbers >= 0 or null), got 1: 0.2 (command "
        "line)",
        "--train.seed takes 1 value (integer >= 0 and <= 2147483647), got 0: none (command line)",
        "--data.max_len takes 1 value (integer >= 2), got 2: 100 200 (command line)",
    ]


def test_files_that_cannot_be_read_are_violations(run_dir: Path, problems):
    (run_dir / "broken.yaml").write_text("a: [1\n")
    (run_dir / "list.yaml").write_text("- 1\n")
    (run_dir / "twice.yaml").write_text("train.seed: 1\ntrain:\n  seed: 2\n")
    absent, broken, not_a_map, twice = problems(
        "--config", "absent.yaml", "broken.yaml", "list.yaml", "twice.yaml"
    )
    assert "absent.yaml" in absent and "readable file" in absent
    assert "broken.yaml:2 is not valid YAML" in broken and "indent with spaces" in broken
    assert "list.yaml must hold a mapping" in not_a_map and "got a list" in not_a_map
    assert twice == "train.seed is set twice in twice.yaml: lines 1 and 3; keep one"


def test_lists_and_texts_in_each_others_place_are_violations(run_dir: Path, problems):
    (run_dir / "more.yaml").write_text(
        "algo.advantage.estimator: [grpo, dapo]\nactor.eps_clip_low_high: 0.2 0.28\n"
    )
    clip, estimator = problems("--config", "more.yaml")
    assert "got grpo dapo (more.yaml:1)" in estimator
    assert clip.endswith("got 0.2 0.28 (more.yaml:2); write it as a list: [0.2, 0.28]")


def test_rules_are_not_checked_on_the_defaults_that_stand_in_for_an_unreadable_file(run_dir: Path):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "absent.yaml", "--train.sead", "1"])
    assert len(caught.value.violations) == 2


def test_words_without_an_option_are_violations(run_dir: Path):
    with pytest.raises(ConfigError, match="got 'run.yaml' at the start of the command line"):
        load_config(["run.yaml", "--config", "run.yaml"])
    with pytest.raises(ConfigError, match="--config takes the path of a YAML file"):
        load_config(["--config"])


def test_all_violations_are_reported_in_one_message(run_dir: Path):
    words = [
        "--config",
        "run.yaml",
        "--train.sead",
        "1",
        "--rollout.top_p",
        "2",
        "--vllm.sync_backend",
        "cuda_ipc",
        "--rollout.max_new_tokens",
        "300",
        "--data.input_key",
        "prompt",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    message = str(caught.value)
    assert message.startswith("5 problems in the configuration:\n- ")
    for name in (
        "train.sead",
        "rollout.top_p",
        "vllm.sync_backend",
        "rollout.max_new_tokens",
        "data.input_key",
    ):
        assert name in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_further_rules_join_the_report_and_the_warnings(run_dir: Path):
    def more(config: RunConfig) -> Findings:
        about = (
            Violation(("train.seed",), "about a seed"),
            Violation(("algo.grpo",), "about grpo"),
        )
        return Findings(about if config.rollout.top_p == 1 else (), ("look at this",))

    words = ["--config", "run.yaml", "--train.seed", "one", "--data.input_key", "prompt"]
    with pytest.raises(ConfigError) as caught:
        load_config(words, more_rules=more)
    messages = [violation.message.split(" ")[0] for violation in caught.value.violations]
    assert messages == ["train.seed:", "data.input_key", "about"]
    config = load_config(["--config", "run.yaml", "--rollout.top_p", "0.9"], more_rules=more)
    assert len(config.warnings) == 2 and config.warnings[1] == "look at this"


def test_an_error_can_carry_a_plain_text():
    error = ConfigError(["--algo.dapo.*: no such key"])
    assert str(error) == "1 problem in the configuration:\n- --algo.dapo.*: no such key"


def test_a_rule_is_silent_about_options_that_are_already_complained_about(problems):
    assert len(problems("--rollout.max_new_tokens", "many", "--data.max_len", "30")) == 1
    assert len(problems("--train.batch_size", "no")) == 1


def test_an_empty_command_line_names_what_is_required(run_dir: Path):
    with pytest.raises(ConfigError) as caught:
        load_config([])
    named = {option for violation in caught.value.violations for option in violation.options}
    assert {"actor.model_name_or_path", "data.prompt_dataset", "reward.remote_url"} <= named


def test_configurations_are_frozen_and_survive_pickling(load):
    config = load("--algo.advantage.estimator", "dapo", "--actor.eps_clip", "0.1")
    with pytest.raises(Exception, match="frozen"):
        config.actor.num_nodes = 2
    copy = pickle.loads(pickle.dumps(config))
    assert isinstance(copy, RunConfig)
    assert copy == config
    assert algorithm_options(copy) == algorithm_options(config)
    assert copy.sources == config.sources


def test_derived_sizes(load):
    config = load(
        "--actor.num_nodes",
        "2",
        "--megatron.tensor_parallel_size",
        "2",
        "--rollout.n_samples_per_prompt",
        "8",
    )
    assert (
        config.world_size,
        config.layout.model_parallel_size,
        config.layout.data_parallel_size,
    ) == (4, 2, 2)
    assert config.samples_per_rollout == 64


def test_dtype_and_probe_tolerance_follow_the_policy(load):
    assert load().rollout_dtype == "bf16"
    assert load().probe_tolerance == 0.1
    assert load("--megatron.param_dtype", "fp32").probe_tolerance == 1e-4
    assert load("--megatron.param_dtype", "fp32", "--vllm.dtype", "bf16").probe_tolerance == 0.1
    assert load("--fp8.rollout_enable").probe_tolerance == 0.4
    assert (
        load("--fp8.rollout_enable", "--weight_sync.probe_tolerance", "0.01").probe_tolerance
        == 0.01
    )
    assert load("--weight_sync.probe_tolerance", "0.01").probe_tolerance == 0.01
    assert (
        load("--fp8.rollout_enable").repeat_tolerance
        == load("--fp8.enable").repeat_tolerance
        == 0.1
    )
    assert load("--fp8.enable", "--fp8.recipe", "delayed").repeat_tolerance == 0.4
    assert load("--weight_sync.probe_tolerance", "0.01").repeat_tolerance == 0.01


def test_true_is_no_number(run_dir: Path, problems):
    (run_dir / "more.yaml").write_text("train.seed: true\nactor.adam.lr: true\n")
    assert problems("--config", "more.yaml") == [
        "actor.adam.lr: expected number >= 0, got true (more.yaml:2)",
        "train.seed: expected integer >= 0 and <= 2147483647, got true (more.yaml:1)",
    ]


def test_infinite_numbers_are_refused(problems):
    assert len(problems("--actor.adam.lr", "inf")) == 1
    assert len(problems("--rollout.temperature", "nan")) == 1
    assert math.isinf(RunConfig().ckpt.max_mem)


def test_help_lists_every_option_and_filters(capsys):
    for words in (["--help"], ["-h"], ["--config", "absent.yaml", "--help"]):
        with pytest.raises(SystemExit) as stop:
            load_config(words)
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "--actor.adam.lr  <number >= 0>" in text and "--ds.zero_stage" in text
    with pytest.raises(SystemExit):
        load_config(["--help", "megatron"])
    text = capsys.readouterr().out
    assert "--megatron.tensor_parallel_size" in text and "--actor.adam.lr" not in text
    with pytest.raises(
        ConfigError, match="--help trian: no option matches; did you mean train[?] groups: actor, "
    ):
        load_config(["--help", "trian"])


def test_an_option_without_its_dashes_is_no_file(run_dir: Path):
    (run_dir / "a.yaml").write_text("train: {seed: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(run_dir / "a.yaml"), "actor.adam.lr", "3"])
    said = [
        violation.message for violation in error.value.violations if "--config" in violation.message
    ]
    assert said == [
        "options start with --: got 'actor.adam.lr' after --config; did you mean --actor.adam.lr?"
    ]


def test_a_check_is_fast_and_imports_nothing_heavy(run_dir: Path):
    program = (
        "import sys; from openrlhf_ext.config import load_config; load_config(['--config', "
        f"'run.yaml']);print([name for name in {HEAVY} if name in sys.modules]); import time; "
        "print(time.process_time())"
    )
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    imported, seconds = out.stdout.splitlines()
    assert imported == "[]"
    assert float(seconds) < 5  # about 0.4 s


BOMB = "x: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"y{i}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for i, (old, new) in enumerate(zip("abcdefgh", "bcdefghi", strict=True))
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "train.seed: !!int abc\n",
            "run.yaml:1 is not valid YAML: 'abc' is not a valid int (column 13)",
        ),
        ("train.seed: !!bool [1]\n", "the tag bool is not supported"),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            "the tag python/object/apply:os.getcwd is not supported",
        ),
        ("a: !!timestamp 2020-01-01\n", "'2020-01-01' is not a valid timestamp"),
        (
            "train: &a\n  seed: *a\n",
            "run.yaml:2 is not valid YAML: the alias *a has no complete anchor before it",
        ),
        ("a: " + "[" * 2000 + "\n", "nested deeper than 20 levels"),
        (BOMB, "more than 20000 values, aliases included"),
        ("? [1]\n: 2\n", "a name must be text"),
        ('a: "\\ud800"\n', "is not a valid str"),
        ("x" * (1 << 21), "is too large: it must have at most 1048576 bytes"),
        (b"a: \xff\n", "is not UTF-8 text"),
    ],
)
def test_yaml_that_would_take_a_reader_apart_is_refused_with_its_line(
    run_dir: Path, text, complaint, capsys
):
    (run_dir / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["--config", "run.yaml", "--dry_run"]) == 2
    assert complaint in capsys.readouterr().err


def test_anchors_that_mean_no_harm_are_read(run_dir: Path):
    text = (run_dir / "run.yaml").read_text()
    (run_dir / "run.yaml").write_text(
        text + "actor.adam: {betas: &b [0.9, 0.99]}\ncritic.adam: {betas: *b}\n"
    )
    assert load_config(["--config", "run.yaml"]).critic.adam.betas == (0.9, 0.99)


@pytest.mark.parametrize("name", ["\0", "x" * 300, "loop/x"])
@pytest.mark.parametrize(
    "option",
    [
        "data.prompt_dataset",
        "actor.model_name_or_path",
        "ckpt.path",
        "logger.figure_path",
        "eval.dataset",
    ],
)
def test_a_path_that_the_system_cannot_look_up_is_said_with_its_option(
    run_dir: Path, problems, option, name
):
    (run_dir / "loop").symlink_to("loop")
    (message,) = problems(f"--{option}", name)
    assert message.startswith(f"{option} must not be or contain a path that cannot be looked up (")
    assert any("must name a readable file" in m for m in problems("--config", name))


@pytest.mark.parametrize("value", [10**25, 2**31])
@pytest.mark.parametrize(
    "option", ["train.micro_batch_size", "weight_sync.bucket_mib", "data.max_len", "train.seed"]
)
def test_integers_are_bounded(problems, option, value):
    (message,) = problems(f"--{option}", str(value))
    assert message.startswith(f"{option}: expected integer") and str(value) in message


def test_the_largest_integer_is_said(problems):
    assert problems("--data.max_samples", "9999999999")[0].endswith(
        "; the largest integer is 2147483647"
    )


def test_a_file_of_another_program_gets_a_short_and_quick_answer(run_dir: Path, monkeypatch):
    (run_dir / "other.yaml").write_text("".join(f"their_option_{n}: {n}\n" for n in range(5000)))
    asked = []
    nearest = OptionTable.nearest
    monkeypatch.setattr(
        OptionTable, "nearest", lambda table, name: asked.append(name) or nearest(table, name)
    )
    with pytest.raises(ConfigError) as raised:
        load_config(["--config", str(run_dir / "other.yaml")])
    told = str(raised.value)
    assert "- and 4980 more unknown options, the last one their_option_4999 (" in told
    assert "- actor.model_name_or_path" in told, "what else is wrong is not hidden"
    assert "unknown option their_option_0 (" in told and len(told) < 20_000
    assert len(asked) <= 20, "each takes milliseconds"
