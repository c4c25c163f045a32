"""Which tokens of an example are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from openrlhf_ext.cli import train_sft
from openrlhf_ext.inputs import InputError, require_one_beginning
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.sft.data import fingerprint, load_examples, read_examples, save_examples
from tests.config.conftest import load_supervised
from tests.models import CHAT_TEMPLATE, make_tiny_policy

pytest.importorskip("openrlhf", reason="examples are read by OpenRLHF's class")

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
CHAT = [
    USER,
    ANSWER,
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "3, I think"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_policy(path, chat_template=CHAT_TEMPLATE)
    return path


@pytest.fixture
def examples_of(model: Path, tmp_path: Path):
    def read(records: list[dict], *words: str) -> SequenceBatch:
        (tmp_path / "examples.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        given = [
            "--model.model_name_or_path",
            str(model),
            "--data.dataset",
            str(tmp_path / "examples.jsonl"),
        ]
        given += ["--data.input_key", "q", "--data.max_len", "256", *words]
        return read_examples(load_supervised(given))[0]

    return read


def trained(batch: SequenceBatch, model: Path) -> list[list[str]]:
    """The texts of each example that are trained on, one for each range."""
    tokenizer, found, at = AutoTokenizer.from_pretrained(model), [], 0
    for row in range(len(batch)):
        one = batch.select(slice(row, row + 1))
        texts = [
            tokenizer.decode(one.tokens_M[start:stop]) for start, stop in one.ranges_R2.tolist()
        ]
        found.append(texts)
        at += len(texts)
    return found


def whole(batch: SequenceBatch, model: Path) -> str:
    return AutoTokenizer.from_pretrained(model).decode(batch.tokens_M)


def test_an_answer_behind_a_template(examples_of, model):
    batch = examples_of(
        [{"q": "1+1?", "a": "2"}, {"q": "3", "a": "x<|im_end|>"}], "--data.output_key", "a"
    )
    assert trained(batch, model) == [["2 <|im_end|>"], ["x<|im_end|>"]], (
        "a blank before the end is OpenRLHF's"
    )
    assert whole(batch.select(slice(0, 1)), model) == "User: 1+1?\nAssistant: 2 <|im_end|>"


def test_no_template(examples_of, model):
    batch = examples_of(
        [{"q": "1+1=", "a": "2"}], "--data.output_key", "a", "--data.input_template", "null"
    )
    assert whole(batch, model) == "1+1=2 <|im_end|>"


def test_the_last_answer_of_a_chat(examples_of, model):
    batch = examples_of([{"q": CHAT}], "--data.apply_chat_template")
    assert trained(batch, model) == [["3, I think<|im_end|>"]]
    assert whole(batch, model).endswith(
        "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n3, I think<|im_end|>"
    )


def test_every_answer_of_a_chat(examples_of, model):
    batch = examples_of([{"q": CHAT}], "--data.apply_chat_template", "--data.multiturn")
    assert trained(batch, model) == [["2<|im_end|>\n", "3, I think<|im_end|>"]]


def test_prompt_and_answer_through_the_chat_template(examples_of, model):
    words = ["--data.apply_chat_template", "--data.output_key", "a"]
    texts = examples_of([{"q": "1+1?", "a": "2"}], *words)
    lists = examples_of([{"q": [USER], "a": [ANSWER]}], *words)
    assert trained(texts, model) == [["2<|im_end|>"]] and fingerprint(texts) == fingerprint(lists)


def test_another_chat_template(examples_of, model):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    words = [
        "--data.apply_chat_template",
        "--data.output_key",
        "a",
        "--data.tokenizer_chat_template",
        template,
    ]
    assert whole(examples_of([{"q": "1+1?", "a": "2"}], *words), model) == "[1+1?][2] <|im_end|>"


def test_continued_pretraining_is_on_every_token_but_the_first(examples_of, model):
    batch = examples_of([{"q": "plain text"}], "--model.pretrain_mode_enable")
    assert trained(batch, model) == [["lain text"]]


def test_what_is_too_long_is_cut_or_skipped(examples_of, model, caplog):
    records = [{"q": "1" * 30, "a": "2"}, {"q": "1", "a": "2" * 40}]
    words = ["--data.output_key", "a", "--data.max_len", "32", "--data.input_template", "null"]
    assert trained(examples_of(records, *words), model) == [["2" * 31]], (
        "a cut answer is not taught to end"
    )
    assert "skipped 1 of 2 examples" in caplog.text
    assert (
        "cut 1 of 2 examples at data.max_len 32: what is left of the answer does not end"
        in caplog.text
    )
    assert trained(examples_of(records, *words, "--data.cut_answers", "end"), model) == [
        ["2" * 30 + "<|im_end|>"]
    ]
    with pytest.raises(
        InputError, match="holds no example with a token to train on within data.max_len 32"
    ):
        examples_of(records[:1], *words)


def test_a_cut_in_a_users_turn_leaves_answers_whole(examples_of, model, caplog):
    words = ["--data.apply_chat_template", "--data.multiturn", "--data.max_len", "110"]
    assert trained(examples_of([{"q": CHAT}], *words), model) == [["2<|im_end|>\n"]]
    assert "cut 1 of 1 examples" in caplog.text, "the second answer is lost"


def test_many_records_are_made_in_several_processes(examples_of, model, monkeypatch):
    records = [{"q": f"{i}+1=", "a": str(i + 1)} for i in range(700)]
    words = ["--data.output_key", "a"]
    alone = fingerprint(examples_of(records, *words))
    monkeypatch.setattr("openrlhf_ext.sft.data._RECORDS_IN_ONE_PROCESS", 300)
    assert fingerprint(examples_of(records, *words)) == alone


def test_a_table_of_chats_makes_the_examples_of_the_lines(examples_of, model, tmp_path):
    """Parquet gives every message, and the arguments of every call, the keys of all."""
    import pyarrow
    import pyarrow.parquet

    calls = [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "search", "arguments": {"k": 3}},
    ]
    chats = [
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": calls[i % 2]}],
            },
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": f"answer {i}"},
        ]
        for i in range(4)
    ]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if 'tool_calls' in m %}"
        "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endif "
        "%}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
        "endif %}"
    )
    words = [
        "--data.apply_chat_template",
        "--data.multiturn",
        "--data.tokenizer_chat_template",
        template,
        "--data.max_len",
        "512",
    ]
    lines = examples_of([{"q": chat} for chat in chats], *words)
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": chat} for chat in chats]), path)
    table = examples_of([], *words, "--data.dataset", str(path))
    assert fingerprint(lines) == fingerprint(table)
    assert '"city": "Paris"}' in whole(table, model) and "null" not in whole(table, model)


@pytest.mark.parametrize(
    ("adds", "written", "said"),
    [
        (True, "", "none begins with '<|endoftext|>', which the tokenizer would put there"),
        (True, "<|endoftext|>", ""),
        (False, "", ""),
        (True, "<|endoftext|><|endoftext|>", "twice, the first is record 1"),
    ],
)
def test_a_beginning_that_is_lacking_is_said_and_one_that_is_there_twice_refused(
    model, caplog, adds, written, said
):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|endoftext|>"
    tokens = tokenizer([f"{written}1+1"], add_special_tokens=False)["input_ids"]
    tokenizer.add_bos_token = adds
    if "twice" in said:
        with pytest.raises(InputError, match=said):
            require_one_beginning(tokenizer, tokens, "the prompts")
    else:
        require_one_beginning(tokenizer, tokens, "the prompts")
        assert said in caplog.text and bool(said) == bool(caplog.text)


def test_what_cannot_be_found_is_refused_with_its_records(examples_of, model):
    template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    with pytest.raises(
        InputError, match="with data.tokenizer_chat_template: record 2 message 2: .*<think>"
    ):
        examples_of(
            [
                {"q": [USER, {"role": "assistant", "content": "<think>\nso\n</think>2"}]},
                {"q": CHAT[:2]},
            ],
            "--data.apply_chat_template",
            "--data.tokenizer_chat_template",
            template,
        )


def test_a_dry_run_reads_the_examples(model, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"q": CHAT[:2]}) + "\n")
    words = [
        "--model.model_name_or_path",
        str(model),
        "--data.dataset",
        str(data),
        "--data.input_key",
        "q",
        "--data.max_len",
        "256",
        "--data.apply_chat_template",
        "--train.batch_size",
        "1",
        "--dry_run",
    ]
    assert train_sft.main(words) == 0
    assert "examples: 1, of 103 tokens, 2 of which are trained on" in capsys.readouterr().out
    template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    assert train_sft.main([*words, "--data.tokenizer_chat_template", template]) == 2
    assert "would not start: " in (said := capsys.readouterr().err) and "record 1 message 2" in said


def test_ranks_map_what_one_has_written(examples_of, tmp_path):
    batch = examples_of(
        [{"q": CHAT}, {"q": CHAT[:2]}], "--data.apply_chat_template", "--data.multiturn"
    )
    save_examples(tmp_path / "shared", "train", batch)
    read = load_examples(tmp_path / "shared", "train")
    assert read is not None and fingerprint(read) == fingerprint(batch)
    assert load_examples(tmp_path / "shared", "held_out") is None
    assert fingerprint(read.select([1, 0])) != fingerprint(batch), "the order counts"
