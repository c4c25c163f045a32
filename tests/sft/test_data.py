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
CHAT = [USER, ANSWER, {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3, I think"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_policy(path, chat_template=CHAT_TEMPLATE)
    return path


@pytest.fixture
def examples_of(model: Path, tmp_path: Path):
    def read(records: list[dict], *words: str) -> SequenceBatch:
        (tmp_path / "examples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        given = ["--model.model_name_or_path", str(model), "--data.dataset", str(tmp_path / "examples.jsonl")]
        given += ["--data.input_key", "q", "--data.max_len", "256", *words]
        return read_examples(load_supervised(given))[0]

    return read


def trained(batch: SequenceBatch, model: Path) -> list[list[str]]:
    """The texts of each example that are trained on, one for each range."""
    tokenizer, found, at = AutoTokenizer.from_pretrained(model), [], 0
    for row in range(len(batch)):
        one = batch.select(slice(row, row + 1))
        texts = [tokenizer.decode(one.tokens_M[start:stop]) for start, stop in one.ranges_R2.tolist()]
        found.append(texts)
        at += len(texts)
    return found


def whole(batch: SequenceBatch, model: Path) -> str:
    return AutoTokenizer.from_pretrained(model).decode(batch.tokens_M)


def test_an_answer_behind_a_template(examples_of, model):
    batch = examples_of([{"q": "1+1?", "a": "2"}, {"q": "3", "a": "x<|im_end|>"}], "--data.output_key", "a")
    assert trained(batch, model) == [["2 <|im_end|>"], ["x<|im_end|>"]], "a blank before the end is OpenRLHF's"
    assert whole(batch.select(slice(0, 1)), model) == "User: 1+1?\nAssistant: 2 <|im_end|>"


def test_no_template(examples_of, model):
    batch = examples_of([{"q": "1+1=", "a": "2"}], "--data.output_key", "a", "--data.input_template", "null")
    assert whole(batch, model) == "1+1=2 <|im_end|>"


def test_the_last_answer_of_a_chat(examples_of, model):
    batch = examples_of([{"q": CHAT}], "--data.apply_chat_template")
    assert trained(batch, model) == [["3, I think<|im_end|>"]]
    assert whole(batch, model).endswith("<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n3, I think<|im_end|>")


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
    words = ["--data.apply_chat_template", "--data.output_key", "a", "--data.tokenizer_chat_template", template]
    assert whole(examples_of([{"q": "1+1?", "a": "2"}], *words), model) == "[1+1?][2] <|im_end|>"


def test_continued_pretraining_is_on_every_token_but_the_first(examples_of, model):
    batch = examples_of([{"q": "plain text"}], "--model.pretrain_mode_enable")
    assert trained(batch, model) == [["lain text"]]


def test_what_is_too_long_is_cut_or_skipped(examples_of, model, caplog):
    records = [{"q": "1" * 30, "a": "2"}, {"q": "1", "a": "2" * 40}]
    words = ["--data.output_key", "a", "--data.max_len", "32", "--data.input_template", "null"]
    assert trained(examples_of(records, *words), model) == [["2" * 30 + "<|im_end|>"]]
    assert "skipped 1 of 2 examples" in caplog.text
    with pytest.raises(InputError, match="holds no example with a token to train on within data.max_len 32"):
        examples_of(records[:1], *words)


@pytest.mark.parametrize(("adds", "written", "said"), [
    (True, "", "none begins with '<|endoftext|>', which the tokenizer would put there"),
    (True, "<|endoftext|>", ""), (False, "", ""), (True, "<|endoftext|><|endoftext|>", "twice, the first is record 1"),
])  # fmt: skip
def test_a_beginning_that_is_lacking_is_said_and_one_that_is_there_twice_refused(model, caplog, adds, written, said):
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
    with pytest.raises(InputError, match="with data.tokenizer_chat_template: record 2 message 2: .*<think>"):
        examples_of(
            [{"q": [USER, {"role": "assistant", "content": "<think>\nso\n</think>2"}]}, {"q": CHAT[:2]}],
            "--data.apply_chat_template", "--data.tokenizer_chat_template", template,
        )  # fmt: skip


def test_a_dry_run_reads_the_examples(model, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"q": CHAT[:2]}) + "\n")
    words = ["--model.model_name_or_path", str(model), "--data.dataset", str(data), "--data.input_key", "q",
             "--data.max_len", "256", "--data.apply_chat_template", "--train.batch_size", "1", "--dry_run"]  # fmt: skip
    assert train_sft.main(words) == 0
    assert "examples: 1, of 103 tokens, 2 of which are trained on" in capsys.readouterr().out
    template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    assert train_sft.main([*words, "--data.tokenizer_chat_template", template]) == 2
    assert "would not start: " in (said := capsys.readouterr().err) and "record 1 message 2" in said


def test_ranks_map_what_one_has_written(examples_of, tmp_path):
    batch = examples_of([{"q": CHAT}, {"q": CHAT[:2]}], "--data.apply_chat_template", "--data.multiturn")
    save_examples(tmp_path / "shared", "train", batch)
    read = load_examples(tmp_path / "shared", "train")
    assert read is not None and fingerprint(read) == fingerprint(batch)
    assert load_examples(tmp_path / "shared", "held_out") is None
    assert fingerprint(read.select([1, 0])) != fingerprint(batch), "the order counts"
