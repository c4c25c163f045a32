"""Which tokens of a chat are trained on, under the forms of eight published chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrlhf_ext.sft.turns import Example, ExampleForm, Refused
from tests.models import make_tiny_policy

SYSTEM = {"role": "system", "content": "Be short."}
ONE, TWO = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "2+2?"}
PLAIN = [ONE, {"role": "assistant", "content": "2"}, TWO, {"role": "assistant", "content": "4"}]
THOUGHT = [
    ONE,
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    TWO,
    {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOLS = [ONE, CALL, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2"}]

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}"
_ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "qwen2.5": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n"
        "' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n"
        "<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% else %}{{ "
        "'<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}{{ "
        "'<tool_call>\n' + c.function.name + ' ' + c.function.arguments|tojson + '\n"
        "</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + _ASKS
    ),
    # writes a block of reasoning before the last answer only, an empty one if it has none
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
        "{% set thought = '' %}{% if '</think>' in text %}{% set thought = "
        "text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{% set text "
        "= text.split('</think>')[-1].lstrip('\n') %}{% endif %}{% if loop.index0 > ns.last "
        "%}{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}{% endif "
        "%}" + _CHATML + "{% endfor %}" + _ASKS
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
        "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
        "endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
        "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ "
        "raise_exception('no system role') }}{% endif %}{{ '<start_of_turn>' + ('model' if "
        "m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% "
        "endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "deepseek_r1": (  # drops reasoning everywhere, and opens it in the generation prompt
        "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') if "
        "m.role == 'assistant' else m.content %}" + _CHATML + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    # of DeepSeek's distilled models: the same, with tokens of its own; the system's words come
    # first
    "r1_distill": (
        "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif "
        "m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + "
        "eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|Assistant|><think>\n' }}{% endif %}"
    ),
    "thinking_2507": (  # opens reasoning in the generation prompt, and keeps it
        "{% for m in messages %}{% set text = m.content %}" + _CHATML + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "marked": (  # SmolLM3's and TRL's way
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' "
        "%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else "
        "%}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _ASKS
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = tmp_path_factory.mktemp("model")
    make_tiny_policy(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


def form(
    tokenizer: PreTrainedTokenizerBase, template: str | None = None, **given: Any
) -> ExampleForm:
    tokenizer.chat_template = template
    fields = {
        "prompt_key": "q",
        "answer_key": None,
        "max_len": 2000,
        "chat": template is not None,
    } | given
    return ExampleForm(tokenizer=tokenizer, **fields)


def trained(made: ExampleForm, record: dict[str, Any]) -> list[str]:
    example = made.example(record)
    assert example is not None
    return [made.tokenizer.decode(example.ids[start:stop]) for start, stop in example.ranges]


@pytest.mark.parametrize(
    ("name", "chat", "multiturn", "answers"),
    [
        ("qwen2.5", PLAIN, True, ["2<|im_end|>\n", "4<|im_end|>"]),
        ("qwen2.5", [SYSTEM, *PLAIN], True, ["2<|im_end|>\n", "4<|im_end|>"]),
        (
            "qwen2.5",
            THOUGHT,
            True,
            [f"{THOUGHT[1]['content']}<|im_end|>\n", f"{THOUGHT[3]['content']}<|im_end|>"],
        ),
        (
            "qwen2.5",
            TOOLS,
            True,
            ['<tool_call>\nadd {"a": 1}\n</tool_call><|im_end|>\n', "It is 2<|im_end|>"],
        ),
        ("qwen3", THOUGHT, False, [f"{THOUGHT[3]['content']}<|im_end|>"]),
        ("qwen3", PLAIN, True, ["2<|im_end|>\n", "4<|im_end|>"]),
        ("qwen3", [ONE, {"role": "assistant", "content": ""}], False, ["<|im_end|>"]),
        # not the empty block of reasoning, which no record says
        ("qwen3", PLAIN, False, ["4<|im_end|>"]),
        ("llama3", PLAIN, True, ["2<|eot_id|>", "4<|eot_id|> <|im_end|>"]),
        ("llama3", PLAIN, False, ["4<|eot_id|> <|im_end|>"]),
        ("llama2", PLAIN, True, [" 2 <|im_end|>", " 4 <|im_end|>"]),
        ("gemma", PLAIN, True, ["2<end_of_turn>\n", "4<end_of_turn> <|im_end|>"]),
        ("thinking_2507", THOUGHT[:2], False, ["one and one\n</think>\n\n2<|im_end|>"]),
        (
            "marked",
            THOUGHT,
            True,
            [f"{THOUGHT[1]['content']}<|im_end|>", f"{THOUGHT[3]['content']}<|im_end|>"],
        ),
        ("marked", PLAIN, False, ["4<|im_end|>"]),
    ],
)
def test_the_assistants_words_are_trained_on_and_nothing_else(
    tokenizer, name, chat, multiturn, answers
):
    assert trained(form(tokenizer, TEMPLATES[name], multiturn=multiturn), {"q": chat}) == answers


@pytest.mark.parametrize(
    ("name", "chat", "multiturn", "rule"),
    [
        (
            "qwen3",
            THOUGHT,
            True,
            "message 2: the chat rendered up to its answer is not a prefix .* '<think>",
        ),
        (
            "deepseek_r1",
            THOUGHT[:2],
            False,
            "message 2: the chat rendered before its answer is not a prefix",
        ),
        (
            "r1_distill",
            THOUGHT[:2],
            False,
            "message 2: the chat rendered before its answer .* is followed by '<think>",
        ),
        (
            "r1_distill",
            PLAIN,
            False,
            "message 4: the chat rendered before its answer is not a prefix",
        ),
        (
            "deepseek_r1",
            PLAIN,
            True,
            "message 2: the chat rendered before its answer is not a prefix",
        ),
        (
            "thinking_2507",
            PLAIN,
            False,
            "message 4: the chat rendered before its answer is not a prefix",
        ),
        ("gemma", [SYSTEM, *PLAIN], False, "is rejected by the chat template: .*no system role"),
        (
            "llama3",
            TOOLS,
            True,
            "message 2: the chat template does not write the assistant's words 'add'",
        ),
        (
            "llama3",
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "2", "reasoning_content": "why"},
            ],
            False,
            "message 2: the chat template does not write the assistant's words 'why'",
        ),
        (
            "marked",
            TOOLS,
            True,
            "message 2: the chat template does not write the assistant's words 'add'",
        ),
    ],
)
def test_what_cannot_be_found_is_refused(tokenizer, name, chat, multiturn, rule):
    with pytest.raises(Refused, match=f"(?s){rule}"):
        form(tokenizer, TEMPLATES[name], multiturn=multiturn).example({"q": chat})


def test_a_template_that_drops_reasoning_is_refused_where_the_prompt_opens_none(tokenizer):
    template = TEMPLATES["deepseek_r1"].replace("assistant\n<think>\n", "assistant\n")
    with pytest.raises(Refused, match="does not write the assistant's words '<think>"):
        form(tokenizer, template).example({"q": THOUGHT[:2]})


def test_an_empty_block_of_reasoning_is_said_and_not_trained_on(tokenizer):
    example = form(tokenizer, TEMPLATES["qwen3"], answer_key="a").example({"q": "1+1?", "a": "t"})
    assert example is not None and example.added == "<think>\n\n</think>\n\n"
    assert tokenizer.decode(example.ids[slice(*example.ranges[0])]) == "t<|im_end|>"


DROPS_ARGUMENTS = TEMPLATES["qwen2.5"].replace("+ ' ' + c.function.arguments|tojson", "")
CALLED = {
    "city": "São Paulo",
    "days": [1, 2.5],
    "text": 'a "b"\nc',
    "metric": True,
    "from": None,
    "at": "1e5",
    "eps": 1e-05,
}


@pytest.mark.parametrize(
    "arguments", [CALLED, json.dumps(CALLED), {"days": 3}, '{"days": 3, "lr": 1e5}']
)
def test_a_template_that_drops_the_arguments_of_a_call_is_refused(tokenizer, arguments):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    with pytest.raises(
        Refused,
        match="message 2: the chat template does not write the assistant's words '(city|days)",
    ):
        form(tokenizer, DROPS_ARGUMENTS).example({"q": [ONE, call]})
    for writes in ("arguments|tojson", "arguments|string", "arguments"):
        if isinstance(arguments, dict) and writes == "arguments":
            continue
        template = TEMPLATES["qwen2.5"].replace("arguments|tojson", writes)
        assert "days" in trained(form(tokenizer, template), {"q": [ONE, call]})[0]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("name", ["qwen2.5", "marked"])
def test_answers_that_are_marked_as_context_are_not_trained_on(tokenizer, name, mark):
    chat = [PLAIN[0], PLAIN[1] | mark, PLAIN[2], PLAIN[3] | {"weight": 1, "train": True}]
    assert trained(form(tokenizer, TEMPLATES[name], multiturn=True), {"q": chat}) == ["4<|im_end|>"]
    assert form(tokenizer, TEMPLATES[name]).example({"q": [*PLAIN[:3], PLAIN[3] | mark]}) is None


@pytest.mark.parametrize("name", ["qwen2.5", "marked"])
def test_a_weight_between_is_refused(tokenizer, name):
    with pytest.raises(
        Refused, match=r"has a message of weight 0.5: only 0 \(context\) and 1 are supported"
    ):
        form(tokenizer, TEMPLATES[name], multiturn=True).example(
            {"q": [PLAIN[0], PLAIN[1] | {"weight": 0.5}]}
        )


def test_a_chat_that_begins_with_an_answer_is_refused(tokenizer):
    with pytest.raises(Refused, match="begins with a message of the assistant"):
        form(tokenizer, TEMPLATES["qwen2.5"], multiturn=True).example({"q": PLAIN[1:]})


def test_messages_of_tools_in_an_answer_are_not_trained_on(tokenizer):
    made = form(tokenizer, TEMPLATES["qwen2.5"], answer_key="a", multiturn=False)
    assert len(trained(made, {"q": TOOLS[:1], "a": TOOLS[1:]})) == 2


@given(prompt=st.text(min_size=1, max_size=20), answer=st.text(min_size=1, max_size=20))
def test_the_trained_tokens_are_the_answer(tokenizer, prompt, answer):
    made = form(tokenizer, answer_key="a")
    example = made.example({"q": prompt, "a": answer})
    assert isinstance(example, Example)
    (start, stop), text = example.ranges[0], tokenizer.decode(example.ids)
    assert stop == len(example.ids) and example.ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(example.ids[:start]) == tokenizer.decode(tokenizer(prompt)["input_ids"])
    assert text == tokenizer.decode(tokenizer(prompt)["input_ids"]) + tokenizer.decode(
        example.ids[start:]
    )
