from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from openrlhf_ext.driver.data import OverlongPromptError, load_prompts
from openrlhf_ext.inputs import InputError
from tests.models import make_tiny_policy


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Reads three prompts of 3, 10 and 40 bytes (one token a byte) with a limit of 10 tokens."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("data")
    make_tiny_policy(folder / "policy")
    prompts = ["abc", "x" * 10, "y" * 40]
    (folder / "p.jsonl").write_text(
        "".join(json.dumps({"q": p, "a": str(i)}) + "\n" for i, p in enumerate(prompts))
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")

    def call(
        overlong: str,
        limit: int = 10,
        file: str = "p.jsonl",
        text: str | None = None,
        chat: bool = False,
    ):
        if text is not None:
            (folder / file).write_text(text)
        data = SimpleNamespace(
            max_samples=100,
            input_template=None,
            input_key="q",
            label_key="a",
            apply_chat_template=chat,
            overlong_prompts=overlong,
        )
        config = SimpleNamespace(data=data, train=SimpleNamespace(seed=1))
        return load_prompts(config, tokenizer, str(folder / file), "train", limit)

    call.tokenizer = tokenizer
    return call


def test_overlong_prompts_are_counted_and_skipped(load):
    data = load("skip")
    assert (data.prompts, data.labels, data.skipped_overlong) == (["abc", "x" * 10], ["0", "1"], 1)
    first = data.first(1)
    assert len(first) == 1 and len(data) == 2, "a copy: the data set itself stays whole"


def test_or_refused_with_the_longest_one_and_the_remedies(load):
    with pytest.raises(
        OverlongPromptError,
        match=r"1 of 3 prompts.*has 40: 'y.*--data.max_len.*overlong_prompts skip",
    ):
        load("error")
    assert load("error", limit=40).skipped_overlong == 0


def test_nothing_left_is_an_error(load):
    with pytest.raises(ValueError, match="no prompt of .* fits"):
        load("skip", limit=2)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"q": None, "a": "1"}, "has an empty 'q'"),
        ({"q": "b", "a": None}, "has an empty 'a'"),
        (
            {"q": [{"role": "user", "content": "b"}], "a": "1"},
            "has a list under 'q', which must be a text",
        ),
    ],
)
def test_records_that_are_no_prompts_are_said_so(load, record, fault):
    """Of a folder or from the hub; files are looked at before anything starts."""
    good = {"q": "a" if not isinstance(record["q"], list) else None, "a": "1"}
    text = json.dumps(good) + "\n" + json.dumps(record) + "\n"
    with pytest.raises(InputError, match=rf"holes.jsonl, line [12] (has an empty 'q'|{fault})"):
        load("skip", file="holes.jsonl", text=text)


def test_a_file_that_cannot_be_read_is_named(load):
    with pytest.raises(InputError, match=r"broken.jsonl, line 2 cannot be read"):
        load("skip", file="broken.jsonl", text='{"q": "a", "a": "1"}\n{"q": "b\n')


def test_a_prompt_that_the_chat_template_cannot_form_names_the_options(load):
    with pytest.raises(InputError, match=r"data.input_key q and data.apply_chat_template True: "):
        load("skip", chat=True)


def test_contents_that_are_lists_of_texts_are_these_texts(load, monkeypatch):
    """A template of texts alone would write such a list as Python does."""
    rows = [
        {
            "q": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}],
                }
            ],
            "a": "2",
        },
        {"q": "<image>2+2", "a": "4"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setattr(
        load.tokenizer, "chat_template", "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    assert load("skip", limit=99, file="parts.jsonl", text=text, chat=True).prompts == [
        "[1+1]",
        "[<image>2+2]",
    ]
    image = json.dumps({"q": [{"role": "user", "content": [{"type": "image"}]}], "a": "2"}) + "\n"
    with pytest.raises(
        InputError, match="line 1 has a list under 'q', which must be a list of messages"
    ):
        load("skip", file="image.jsonl", text=image, chat=True)
