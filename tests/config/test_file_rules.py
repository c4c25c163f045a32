"""Rules about files: what is read is there and holds what it should, what is written can be."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_ext.config.file_rules import written_bytes
from openrlhf_ext.config.files import DatasetRef, parameter_count, require_definition
from openrlhf_ext.config.records import Scan, Wanted, open_source, scan_records
from openrlhf_ext.inputs import InputError
from tests.config.conftest import load_supervised


def test_the_model_must_be_there(problems):
    (message,) = problems("--actor.model_name_or_path", "absent")
    assert message.startswith("actor.model_name_or_path: ") and "absent does not exist" in message


def test_a_missing_local_folder_is_not_taken_for_a_hub_name(run_dir: Path, problems):
    (run_dir / "runs").mkdir()
    assert "does not exist" in problems("--actor.model_name_or_path", "runs/toy")[0]
    assert "does not exist" in problems("--data.prompt_dataset", "./absent.jsonl")[0]
    assert "does not exist" in problems("--data.prompt_dataset", "absent/train.jsonl")[0]


def test_a_hub_name_skips_the_rules_about_the_model_with_a_warning(load):
    config = load("--actor.model_name_or_path", "org/name", "--data.max_len", "4096")
    assert config.actor.model_name_or_path == "org/name"
    assert len(config.warnings) == 1 and "hub name" in config.warnings[0]


def test_a_hub_name_whose_config_is_in_the_checkout_meets_the_rules_at_once(load, problems):
    assert load("--actor.model_name_or_path", "Qwen/Qwen2.5-7B").warnings == ()
    words = ("--megatron.tensor_parallel_size", "8", "--actor.num_gpus_per_node", "8")
    (message,) = problems("--actor.model_name_or_path", "Qwen/Qwen2.5-7B", *words)
    assert message.startswith(
        "megatron.tensor_parallel_size must divide the model's attention heads: got 8"
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"model_type": "mixtral"},
            "seed_oss, smollm3, got 'mixtral': it would need its",
        ),
        ({"num_hidden_layers": None}, "needs num_hidden_layers, has "),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers must be an integer from 1 to 1024, got 1000000000",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must be a map, or null, got [1]"),
        (
            {"rope_scaling": {"rope_type": 7}},
            "rope_type must be one of default, linear, llama3, yarn, longrope, got 7",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "rope_type llama3 needs factor, high_freq_factor, low_freq_factor",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number, got 'small'"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads must be a multiple of num_key_value_heads, got 8 and 3",
        ),
        ({"model_type": ["qwen2"]}, "model_type must be a text, got ['qwen2']"),
        (
            {"num_attention_heads": "8"},
            "num_attention_heads must be an integer from 1 to 4096, got '8'",
        ),
    ],
)
def test_the_model_must_be_of_a_supported_kind(run_dir: Path, problems, change, complaint):
    path = run_dir / "model/config.json"
    shape = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in shape.items() if value is not None}))
    (message,) = problems()
    assert complaint in message and "config.json" in message


def test_a_model_without_config_or_weights(run_dir: Path, problems, load):
    (run_dir / "model/model.safetensors").unlink()
    assert "no *.safetensors" in load().warnings[0]
    (run_dir / "model/config.json").write_text("{")
    assert "config.json: not JSON (Expecting property name" in problems()[0]
    (run_dir / "model/config.json").unlink()
    assert "cannot be read" in problems()[0]


def test_the_model_folder_must_hold_a_tokenizer(run_dir: Path, problems):
    (run_dir / "model/tokenizer.json").unlink()
    (message,) = problems()
    assert "holds no tokenizer (tokenizer.json" in message
    (run_dir / "model/vocab.json").touch()
    assert problems() == []
    (run_dir / "model/controller.json").touch()
    assert "is a checkpoint to resume from (ckpt.load_enable), not a model" in problems()[0]
    (message,) = problems("--actor.model_name_or_path", "model/config.json")
    assert "model/config.json is a file: give the folder that holds" in message


def test_code_of_a_model_folder_is_said_not_to_run(run_dir: Path, problems, load):
    for name in ("config.json", "tokenizer_config.json"):
        path = run_dir / "model" / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(
            json.dumps(settings | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
        )
    words = [
        "--model.model_name_or_path",
        "model",
        "--data.dataset",
        "train.jsonl",
        "--data.input_key",
        "question",
        "--data.output_key",
        "answer",
        "--data.max_len",
        "64",
    ]
    for warnings in (load().warnings, load_supervised(words).warnings):
        (said,) = [each for each in warnings if "Python code" in each]
        assert "model has its own Python code (auto_map), which is not executed" in said
        assert "where the tokenizer needs the code" in said and "save it as tokenizer.json" in said
    (run_dir / "model/tokenizer.json").unlink()
    (run_dir / "model/vocab.json").touch()
    (message,) = problems()
    assert (
        "has a tokenizer with its own Python code, which is not executed; if you trust it, save"
        in message
    )


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.gguf", "c.00.pth"]
)
def test_weights_that_are_no_safetensors_are_refused(run_dir: Path, problems, name):
    (run_dir / "model" / name).touch()
    assert problems() == [], "beside safetensors nobody reads them"
    (run_dir / "model/model.safetensors").unlink()
    (message,) = problems()
    assert (
        f"model has its weights in {name} alone: safetensors are needed" in message
        and "save_pretrained" in message
    )


def test_prompts_go_through_a_chat_template_only_if_there_is_one(run_dir: Path, problems):
    (run_dir / "model/chat_template.jinja").unlink()
    assert problems() == []
    (message,) = problems("--data.apply_chat_template")
    assert "without a chat template" in message and "data.input_template" in message
    (run_dir / "model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert problems("--data.apply_chat_template") == []


def test_every_record_of_a_jsonl_file_is_looked_at(run_dir: Path, problems):
    path = run_dir / "train.jsonl"
    good = path.read_text()
    path.write_text(good + '\n{"answer": "1"}\n{"question": null}\n{"question": "1+\n[1]\n')
    (message,) = problems()
    assert (
        "line 42 has no 'question', line 43 has an empty 'question', line 44 cannot be read: "
        in message
    )
    assert "line 45 holds a list" in message and "fix or remove" in message
    path.write_text(good + "{}\n" * 7)
    assert "line 45 has no 'question', ...; fix" in problems()[0]
    path.write_text(good + "\n\n")
    assert problems() == []


FORMS = ["a.jsonl", "lines.json", "array.json", "a.csv", "a.parquet", "a.arrow"]


def scanned(path: str, wanted: Wanted) -> Scan:
    return scan_records(open_source(DatasetRef(path, None), "train"), wanted)


def write_records(path: Path, records: list[dict]) -> str:
    """The records in the form that the file's name says."""
    import pandas
    import pyarrow

    frame = pandas.DataFrame(records)
    if path.name == "array.json":
        path.write_text(f"\n {json.dumps(records, indent=1)}\n")
    elif path.suffix in (".jsonl", ".json"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    else:
        table = pyarrow.Table.from_pandas(frame, preserve_index=False)
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    return str(path)


@pytest.mark.parametrize("name", FORMS)
def test_every_record_of_every_form_is_looked_at(tmp_path: Path, name):
    wanted = Wanted("q", "a")
    records = [{"q": f"{i}+1=", "a": str(i), "b": i} for i in range(3000)]
    scan = scanned(write_records(tmp_path / name, records), wanted)
    assert (scan.records, scan.keys, scan.faults) == (3000, ("q", "a", "b"), [])
    records[2500]["a"] = None
    records[2700]["q"] = ""
    place = "line" if name in ("a.jsonl", "lines.json") else "record"
    faults = scanned(write_records(tmp_path / name, records), wanted).faults
    assert faults == [f"{place} 2501 has an empty 'a'", f"{place} 2701 has an empty 'q'"]


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "1+1"}], 7, {"a": "1"}, True])
def test_a_prompt_that_is_no_text_is_named_whatever_its_number(run_dir: Path, problems, prompt):
    with (run_dir / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": prompt, "answer": "2"}) + "\n")
    (message,) = problems()
    assert (
        "train.jsonl" in message
        and "line 41 has a " in message
        and "which must be a text" in message
    )
    messages = problems("--data.apply_chat_template")
    assert messages == [] if isinstance(prompt, list) else "line 41 has a " in messages[0]


def test_messages_have_roles_and_contents(run_dir: Path, problems):
    good = {"question": [{"role": "user", "content": "1+1"}], "answer": "2"}
    bad = {"question": [{"role": "user", "text": "1+1"}], "answer": "2"}
    (run_dir / "train.jsonl").write_text((json.dumps(good) + "\n") * 8 + json.dumps(bad))
    assert (
        "line 9 has a list under 'question', which must be a list of messages"
        in problems("--data.apply_chat_template")[0]
    )


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"question": "1+1"}, "has no 'answer'"),
        ({"question": "1+1", "answer": None}, "has an empty 'answer'"),
        (
            {"question": "1+1", "answer": 2},
            "has a number under 'answer', but the first record has a text: use one type",
        ),
    ],
)
def test_labels_and_types_of_all_records(run_dir: Path, problems, record, fault):
    with (run_dir / "train.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    (message,) = problems()
    assert f"line 41 {fault}" in message


def test_what_makes_csv_rows_longer_than_the_first_line(run_dir: Path, problems):
    rows = ["question,answer", *(f"{i}+1=,{i + 1}" for i in range(40))]
    words = ["--data.prompt_dataset", "train.csv"]
    (run_dir / "train.csv").write_text("\n".join(rows))
    assert problems(*words) == []
    (run_dir / "train.csv").write_text("\n".join([*rows, "1, and 2,3"]))
    assert "line 42 has more fields" in problems(*words)[0]
    (run_dir / "train.csv").write_text("\n".join([rows[0], *("1, and 2,3" for _ in range(40))]))
    assert "put texts with commas in quotes" in problems(*words)[0]
    (run_dir / "train.csv").write_text("\n".join([*rows, "Who?,None"]))
    assert problems(*words) == [], "a text, as every field"
    (run_dir / "train.csv").write_text("\n".join([*rows, "Who?,"]))
    assert "record 41 has an empty 'answer'" in problems(*words)[0]


def test_a_record_of_an_array_may_be_larger_than_what_is_read_at_a_time(tmp_path: Path):
    records = [{"q": "x" * (3 << 20)}, {"q": "]"}]
    assert scanned(write_records(tmp_path / "array.json", records), Wanted("q")).records == 2


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", "", "it is empty"),
        ("a.csv", "q,a\n", "it is empty"),
        ("a.csv", "", "it is empty"),
        ("a.csv", "q,q\n1,2\n", "the column 'q' twice"),
        ("a.csv", 'q,a\n"1,2\n', "unexpected end of data"),
        ("a.jsonl", '{"q": "1", "q": "2"}\n', "the key 'q' is there twice"),
        ("a.json", '[{"q": "1", "q": "2"}]', "the key 'q' is there twice"),
        ("a.jsonl", '{"q": "1", "a": 1e999}\n', "no float holds 1e999"),
        ("a.json", "[", "record 1: not JSON"),
        ("a.json", "[]", "it is empty"),
        ("a.json", '[{"q": "1"}, {"q"', "record 2: not JSON"),
        ("a.json", '[{"q": "1"} {"q": "2"}]', "record 1: not JSON .Extra data"),
        ("a.json", '[{"q": "1"}] 3', "follows the end of the array"),
        ("a.json", '[{"q": "1"},]', "record 2: not JSON"),
        ("a.jsonl", "[1]\n", "record 1 holds a number, not a mapping"),
        ("a.jsonl", '{"q": "1"\n{"q": "2"}\n', "line 1 cannot be read: not JSON .Expecting"),
        ("a.parquet", "PAR1", "cannot be read as parquet"),
        ("a.arrow", "ARROW1", "cannot be read as arrow"),
    ],
)
def test_files_that_cannot_be_read_on(tmp_path: Path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=complaint) as caught:
        scanned(str(tmp_path / name), Wanted("q"))
    assert str(tmp_path / name) in str(caught.value)


def test_keys_must_be_in_the_first_record_and_those_present_are_listed(problems):
    messages = problems("--data.input_key", "prompt", "--data.label_key", "label")
    assert [message.split(" ")[0] for message in messages] == ["data.input_key", "data.label_key"]
    assert all("has question, answer" in message for message in messages)


def test_lists_of_messages_need_the_chat_template(run_dir: Path, problems):
    record = {"question": [{"role": "user", "content": "1+1"}], "answer": "2"}
    (run_dir / "train.jsonl").write_text((json.dumps(record) + "\n") * 8)
    (message,) = problems()
    assert "has a list under 'question'" in message
    assert message.endswith("; set data.apply_chat_template if the prompts are chats")
    assert problems("--data.apply_chat_template") == []


def test_every_dataset_of_a_list_is_looked_at(problems):
    assert problems("--data.prompt_dataset", "train.jsonl,train.jsonl") == []
    (message,) = problems("--data.prompt_dataset", "train.jsonl,absent.jsonl")
    assert "absent.jsonl does not exist" in message
    assert "must be one of .json" in problems("--data.prompt_dataset", "reward.py,run.yaml")[0]


def test_a_batch_of_rollouts_needs_enough_prompts(problems):
    words = ["--rollout.batch_size", "40"]
    assert problems(*words) == []
    (message,) = problems("--rollout.batch_size", "48")
    assert "got 40 and 48" in message
    (message,) = problems(*words, "--data.max_samples", "39")
    assert "got 39 and 40" in message


def test_evaluation_without_a_dataset_is_no_evaluation(load):
    (warning,) = load("--eval.steps", "5").warnings
    assert (
        warning
        == "eval.steps has no effect: got 5, and eval.dataset is not set; set eval.dataset, or "
        "leave it out"
    )


def test_a_template_has_a_place_for_the_prompt(problems, load):
    for template in ("Q:", "", "{} {x}", "{}{}", "{{}}", "{:d}", "{.real}"):
        (message,) = problems("--data.input_template", template)
        assert message.startswith("data.input_template must contain {}"), template
    for template in ("Q: {}", "{0}", "{{a}} {}"):
        assert problems("--data.input_template", template) == [], template
    (warning,) = load("--data.input_template", "Q: {}", "--data.apply_chat_template").warnings
    assert warning.startswith(
        "data.input_template has no effect: got Q: {}, and data.apply_chat_template is on"
    )
    assert "line break" in load("--data.input_template", "Q: {}\\n").warnings[0]
    assert load("--data.input_template", "Q: {}\n").warnings == ()


def test_a_data_file_has_one_split(run_dir: Path, problems):
    assert problems("--data.prompt_dataset", "org/set", "--data.prompt_split", "test") == []
    for words in (
        ("--data.prompt_split", "test"),
        ("--eval.split", "test", "--eval.dataset", "train.jsonl"),
    ):
        (message,) = problems(*words)
        assert "train.jsonl is a file, which has only the split train: got 'test'" in message


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "def reward(q): ...\n",
            "must define reward_func or reward_funcs at top level; it defines reward",
        ),
        ("def broken(:\n", "cannot be read as Python: SyntaxError"),
        ("class A:\n    def reward_func(self): ...\n", "must define reward_func"),
        ("def reward_func(q): ...\n", None),
        ("async def reward_func(q): ...\n", None),
        ("from rewards import grade as reward_func\n", None),
        ("reward_func = print\n", None),
        ("reward_funcs = [print]\n", None),
        ("def compute_score(data_source, solution_str, ground_truth): ...\n", None),
        ("async def anything(*, completions): ...\n", None),
        (
            "try:\n    from a import reward_func\nexcept ImportError:\n    reward_func = None\n",
            None,
        ),
        ("from rewards import *\n", None),
    ],
)
def test_the_reward_file_defines_its_function(run_dir: Path, problems, source, complaint):
    (run_dir / "reward.py").write_text(source)
    if complaint is None:
        assert problems() == []
    else:
        assert complaint in problems()[0]


def test_reward_sources(run_dir: Path, problems):
    assert "cannot be read" in problems("--reward.remote_url", "absent.py")[0]
    assert "must be a .py file" in problems("--reward.remote_url", "run.yaml")[0]
    assert "separated by commas" in problems("--reward.remote_url", "reward.py,http://a")[0]
    assert problems("--reward.remote_url", "http://a,http://b") == []
    for url in ("http://", "ftp://a/x", "http://a,https://", "http://[a"):
        assert (
            "reward.remote_url: a URL must be http(s)://HOST"
            in problems("--reward.remote_url", url)[0]
        ), url
    assert "a source of rewards is required" in problems("--reward.remote_url", "null")[0]
    (run_dir / "agent.py").write_text("class AgentExecutor: ...\n")
    assert problems("--reward.remote_url", "null", "--train.agent_func_path", "agent.py") == []
    assert "cannot be used together" in problems("--train.agent_func_path", "agent.py")[0]
    (message,) = problems("--reward.remote_url", "null", "--train.agent_func_path", "reward.py")
    assert "must define AgentExecutor" in message


def test_definitions_are_seen_without_running_the_file(tmp_path: Path):
    (tmp_path / "f.py").write_text("raise SystemExit(3)\ndef reward_func(): ...\n")
    require_definition(str(tmp_path / "f.py"), "reward_func")


# ---- what is written


def test_outputs_must_be_writable(run_dir: Path, problems):
    (run_dir / "file").touch()
    for option in ("ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir", "logger.metrics_path"):
        (message,) = problems(
            f"--{option}",
            "file/below/x",
            *(
                []
                if option != "ckpt.output_dir"
                else ["--logger.metrics_path", "m", "--logger.figure_path", "f"]
            ),
        )
        assert message.startswith(f"{option} must be writable") and "is a file" in message
    assert problems("--ckpt.output_dir", "not/yet/there") == []


@pytest.mark.parametrize(
    ("words", "writes", "reads"),
    [
        (
            ["--ckpt.output_dir", "model"],
            "ckpt.output_dir, logger.metrics_path, logger.figure_path",
            "actor.model",
        ),
        (
            ["--ckpt.output_dir", "link"],
            "ckpt.output_dir, logger.metrics_path, logger.figure_path",
            "actor.model",
        ),
        (["--ckpt.path", "model"], "ckpt.path", "actor.model"),
        (["--logger.metrics_path", "model/config.json"], "logger.metrics_path", "actor.model"),
        (["--logger.metrics_path", "train.jsonl"], "logger.metrics_path", "data.prompt_dataset"),
        (
            ["--logger.metrics_path", "old/m", "--eval.dataset", "old/eval_samples.jsonl"],
            "logger.metrics_path",
            "eval.dataset",
        ),
        (["--logger.figure_path", "reward.py"], "logger.figure_path", "reward.remote_url"),
        (["--eval.dataset", "data", "--ckpt.path", "data/below"], "ckpt.path", "eval.dataset"),
        (
            ["--eval.dataset", "data", "--logger.metrics_path", "data/m.jsonl"],
            "logger.metrics_path",
            "eval.dataset",
        ),
    ],
)
def test_what_is_read_is_not_written(run_dir: Path, problems, words, writes, reads):
    (run_dir / "link").symlink_to("model")
    (run_dir / "data").mkdir()
    shutil.copy(run_dir / "train.jsonl", run_dir / "data")
    (run_dir / "old").mkdir()
    (run_dir / "old/eval_samples.jsonl").write_text((run_dir / "train.jsonl").read_text())
    (message,) = problems(*words)
    assert message.startswith(f"{writes} would write into") and f"read by {reads}" in message


def test_the_critic_is_neither_overwritten_nor_written_over_the_policy(run_dir: Path, problems):
    shutil.copytree(run_dir / "model", run_dir / "critic")
    shutil.copytree(run_dir / "model", run_dir / "out_critic")
    words = [
        "--algo.advantage.estimator",
        "gae",
        "--critic.num_gpus_per_node",
        "2",
        "--ckpt.output_dir",
    ]
    other = ["--critic.model_name_or_path", "critic"]
    assert problems(*words, "out", *other) == []
    assert "read by critic.model_name_or_path" in problems(*words, "critic", *other)[0]
    over = [*words, "out", "--actor.model_name_or_path", "out_critic"]
    assert problems(*over) == []
    (message,) = problems(*over, "--critic.save_value_network")
    assert message.startswith("critic.save_value_network would write into the folder of the model")


def test_a_model_is_not_a_checkpoint_that_may_be_moved(run_dir: Path, problems):
    shutil.copytree(run_dir / "model", run_dir / "ckpt/checkpoints_ppo_ray/global_step5_hf")
    shutil.copytree(run_dir / "model", run_dir / "ckpt/checkpoints_ppo_ray/start")
    words = ["--actor.model_name_or_path", "ckpt/checkpoints_ppo_ray/global_step5_hf"]
    (message,) = problems(*words)
    assert message.startswith("actor.model_name_or_path must not be a checkpoint in ckpt.path")
    assert problems(*words, "--ckpt.path", "elsewhere") == []
    assert problems("--actor.model_name_or_path", "ckpt/checkpoints_ppo_ray/start") == []


def test_outputs_may_lie_beside_and_below_a_model_and_above_the_inputs(problems):
    assert problems("--ckpt.output_dir", ".") == []
    assert problems("--ckpt.output_dir", "model/tuned", "--ckpt.path", "model/checkpoints") == []


def test_file_outputs_are_two_files(problems):
    (message,) = problems("--logger.metrics_path", "model")
    assert message.startswith("logger.metrics_path must be a file, ") and message.endswith(
        "model is a folder"
    )
    (message,) = problems("--logger.metrics_path", "m", "--logger.figure_path", "m")
    assert "logger.metrics_path and logger.figure_path must be different files" in message
    (message,) = problems("--logger.metrics_path", "out/events.jsonl")
    assert message.startswith(
        "logger.metrics_path must not be events.jsonl in the folder of logger.metrics_path"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--profile.steps", "0-3"],
            "profile.steps must be a step or a range of steps, such as 5 or 5-7: got 0-3",
        ),
        (["--profile.steps", "5,7"], "such as 5 or 5-7: got 5,7"),
        (
            ["--profile.steps", "7-5"],
            "profile.steps must not end before it begins: got 7-5; swap the two",
        ),
        (
            ["--profile.steps", "5", "--profile.ranks", "0", "99"],
            "profile.ranks must be below actor.num_nodes",
        ),
        (["--profile.steps", "5-7", "--profile.ranks", "-1"], "profile.ranks: expected"),
        (["--logger.samples_every", "0"], "logger.samples_every: expected"),
    ],
)
def test_profiles_and_samples_that_cannot_be_taken(problems, words, said):
    (message,) = problems(*words)
    assert said in message
    assert (
        problems("--profile.steps", "5") == []
        and problems("--profile.steps", "5-5", "--profile.ranks", "0") == []
    )


# ---- checkpoints


PARAMETERS = 1000 * 3
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def weights(run_dir):
    save_file(
        {
            "a": torch.zeros(1000, 2),
            "b": torch.zeros(1000, dtype=torch.bfloat16),
            "ids": torch.zeros(9).long(),
        },
        run_dir / "model/model.safetensors",
    )
    return run_dir


def test_resumable_checkpoints_need_no_other_option(load):
    assert (
        load("--ckpt.save_steps", "2", "--ckpt.load_enable", "--ckpt.async_enable").warnings == ()
    )


def test_a_run_that_writes_nothing_is_refused(problems):
    (message,) = problems("--ckpt.save_steps", "5", "--ckpt.disable_ds")
    assert (
        message.startswith("ckpt.save_steps 5 writes nothing") and "add --ckpt.save_hf" in message
    )
    assert problems("--ckpt.save_steps", "5", "--ckpt.disable_ds", "--ckpt.save_hf") == []


def test_the_best_checkpoint_needs_a_known_metric_and_evaluations(problems):
    known = ("--eval.dataset", "train.jsonl", "--eval.steps", "2", "--ckpt.best_metric_key")
    assert problems(*known, "eval/accuracy") == []
    assert "must be one of eval/accuracy" in problems(*known, "accuracy")[0]
    assert (
        "set eval.dataset and eval.steps" in problems("--ckpt.best_metric_key", "eval/accuracy")[0]
    )


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--train.max_restarts", "2"), "a restart begins from the first step"),
        (("--ckpt.fallback_enable",), "ckpt.load_enable is off and train.max_restarts is 0"),
        (("--ckpt.async_enable",), "ckpt.save_steps is -1 and ckpt.best_metric_key is not set"),
    ],
)
def test_options_without_effect_are_named(load, words, warning):
    (found,) = load(*words).warnings
    assert warning in found
    assert load(*words, "--ckpt.save_steps", "1", "--ckpt.load_enable").warnings == ()


def test_parameters_are_counted_from_the_headers(weights):
    assert parameter_count(str(weights / "model")) == PARAMETERS
    assert parameter_count(str(weights)) is None
    (weights / "model/model.safetensors").write_bytes(b"no header")
    assert parameter_count(str(weights / "model")) is None


@pytest.mark.parametrize(
    ("words", "bytes_each"),
    [
        (("--megatron.param_dtype", "fp32"), 12),
        (("--megatron.param_dtype", "bf16"), 14),
        (("--megatron.param_dtype", "bf16", "--ckpt.save_hf"), 16),
        (("--megatron.param_dtype", "fp32", "--ckpt.save_hf", "--ckpt.disable_ds"), 4),
    ],
)
def test_the_size_of_a_checkpoint(weights, load, words, bytes_each):
    assert written_bytes(load(*words, "--ckpt.save_steps", "1"))[1] == PARAMETERS * bytes_each


def test_a_disk_without_room_is_found_before_the_run(weights, problems, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 40_000))
    (message,) = problems("--ckpt.save_steps", "1", "--megatron.param_dtype", "bf16")
    assert (
        "takes about 42.0 kB" in message
        and "40.0 kB free" in message
        and "use another ckpt.path" in message
    )
    assert "48.0 kB with the final weights, on the same disk" in message
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 48_000))
    assert problems("--ckpt.save_steps", "1", "--megatron.param_dtype", "bf16") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 5_999))
    (message,) = problems("--megatron.param_dtype", "bf16")
    assert message.startswith(
        "the final weights take about 6.0 kB, but the disk of ckpt.output_dir"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 6_000))
    assert problems("--megatron.param_dtype", "bf16") == []
