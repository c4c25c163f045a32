"""One record as text and as tokens, and which of them are the assistant's words.

An answer is trained on only where it can be found exactly. A chat template may mark the assistant's
words itself (transformers' ``{% generation %}``). Of any other one an answer is what follows the
prompt, rendered with the generation prompt: the prompt has to be a beginning of the rendered chat,
and what follows has to be the record's words. Templates that drop earlier reasoning, or whose
generation prompt opens a block that the chat does not have, break this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from openrlhf_ext.config.records import Chat, as_chat
from openrlhf_ext.inputs import InputError, decode

Span = tuple[int, int]
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_OPENING_TAG = re.compile(r"<[^<>]+>")
_WORD = re.compile(r"[A-Za-z0-9]+")
_OTHER_WORDS = ("reasoning_content", "reasoning", "thinking")
_SHOWN = 60
_ROOM = 2  # tokens that a prompt has to leave within max_len


class Refused(ValueError):
    """Which rule an example breaks, and what to do."""


@dataclass(frozen=True)
class Example:
    """Tokens of an example, [start, stop) of those that are trained on, whether words of an answer
    were cut off, and what the template wrote before an answer of its own accord, which is not
    trained on."""

    ids: list[int]
    ranges: list[Span]
    cut: bool = False
    added: str = ""


@dataclass(frozen=True, kw_only=True)
class ExampleForm:
    """How a record becomes an example, see docs/sft.md.

    Args:
        answer_key: None: the prompt is a chat that ends in the answer, or, with ``plain``, all
        there is.
        max_len: in tokens; a longer example is cut.
        end_cut: the last token of what is left of an example becomes the end token, as in OpenRLHF.
        input_template: a format string around the prompt; not used with ``chat``.
        multiturn: every message of the assistant is an answer, not only the last.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    answer_key: str | None
    max_len: int
    input_template: str | None = None
    chat: bool = False
    multiturn: bool = False
    plain: bool = False
    end_cut: bool = False

    def example(self, record: Mapping[str, Any]) -> Example | None:
        """None: it has no answer, or its prompt leaves no room for one. Raises Refused."""
        prompt = record[self.prompt_key]
        if self.plain:
            whole = self._tokens(prompt)
            ids = whole[: self.max_len]
            return Example(ids, [(1, len(ids))] if len(ids) > 1 else [], len(ids) < len(whole))
        added = ""
        if self.chat:
            text, spans, added = self._chat(
                prompt, None if self.answer_key is None else record[self.answer_key]
            )
        else:
            prompt = self.input_template.format(prompt) if self.input_template else prompt
            text = prompt + record[self.answer_key or ""]
            spans = [(len(prompt), len(text))]
        if (
            not spans
            or spans[0][0] == 0
            or len(self._tokens(text[: spans[0][0]])) >= self.max_len - _ROOM
        ):
            return None
        return Example(*self._example(text, spans), added)

    def _example(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span], bool]:
        """As OpenRLHF's SFTDataset: without line ends behind it, with the end token, and cut to
        ``max_len``. An answer that is cut does not end: the policy would learn to stop in the
        middle. Also whether one is."""
        end = str(self.tokenizer.eos_token)
        text = text.rstrip("\n")
        spans = [(start, min(stop, len(text))) for start, stop in spans]
        if not text.endswith(end):
            ends_in_answer = spans[-1][1] == len(text)
            text += f" {end}"
            if ends_in_answer:
                spans[-1] = (spans[-1][0], len(text))
        ids, places = self._located(text, sorted({place for span in spans for place in span}))
        ranges = [(places[start], min(places[stop], self.max_len)) for start, stop in spans]
        if self.end_cut and len(ids) > self.max_len:
            ids[self.max_len - 1] = int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]
        is_cut = any(places[stop] > self.max_len for _, stop in spans)
        return (
            ids[: self.max_len],
            [(start, stop) for start, stop in ranges if start < stop],
            is_cut,
        )

    def _located(self, text: str, places: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Tokens of a text, and how many of them stand before each place. Where a token goes over a
        place, the parts are tokenized one by one, as they are when the policy writes the answer."""
        ids = self._tokens(text)
        before = {
            place: self._tokens(text[:place]) if place < len(text) else ids for place in places
        }
        if all(ids[: len(part)] == part for part in before.values()):
            return ids, {place: len(part) for place, part in before.items()}
        whole, ids, before_n = self._text(ids), [], {}
        for start, stop in zip([0, *places], [*places, len(text)], strict=True):
            before_n[start] = len(ids)
            ids += self._tokens(text[start:stop]) if start < stop else []
        before_n[len(text)] = len(ids)
        if self._text(ids) != whole:
            raise Refused(
                "has a prompt whose tokens are not a prefix of the example's tokens, and the "
                "tokenizer decodes its parts to different text: end the prompt, or begin the "
                "answer, with a line end or a special token"
            )
        return ids, before_n

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    # ---- chats

    def _chat(self, prompt: Any, answer: Any) -> tuple[str, list[Span], str]:
        """A rendered chat, [start, stop) of its trained words, and what the template wrote before
        one of its own."""
        asked, given = as_chat(prompt), as_chat(answer or [], "assistant")
        chat, first = asked + given, len(asked) if given else len(asked) - 1
        turns = [i for i, m in enumerate(chat) if _is_trained(m) and (self.multiturn or i >= first)]
        if strange := [m["weight"] for m in chat if m.get("weight") not in (None, 0, 1)]:
            raise Refused(
                f"has a message of weight {strange[0]!r}: only 0 (context) and 1 are supported"
            )
        template = self.tokenizer.get_chat_template()
        if _GENERATION.search(template):
            return *self._marked(chat, turns, template), ""
        if 0 in turns:
            raise Refused("begins with a message of the assistant: put a user's message before it")
        text, spans, added = self._render(chat), [], ""
        for turn in turns:
            before, until = (
                self._render(chat[:turn], generation=True),
                self._render(chat[: turn + 1]),
            )
            if not text.startswith(before):
                raise Refused(_another(text, before, turn, "before its answer"))
            if text.startswith(until):
                start, stop = len(before) + len(self._lead(chat, turn, before, until)), len(until)
            else:
                start, stop = self._found_in_whole(chat, turn, text, before, until)
            added = text[len(before) : start] or added
            spans.append((start, stop))
        return text, spans, added

    def _found_in_whole(self, chat: Chat, turn: int, text: str, before: str, until: str) -> Span:
        """An answer that the template writes otherwise if the chat ends there, as Qwen3's does: it
        stands where a mark in its place would stand. Raises Refused: it does not."""
        mark = uuid4().hex
        marked = {**chat[turn], "content": mark}
        head, _, tail = self._render([*chat[:turn], marked, *chat[turn + 1 :]]).partition(mark)
        ending = self._render([*chat[:turn], marked]).partition(mark)[2]
        stop = len(text) - len(tail)
        alike = (
            head.startswith(before)
            and text.startswith(head)
            and text.endswith(tail)
            and tail.startswith(ending)
        )
        if not alike or [_squeezed(text[len(head) : stop])] != [
            *map(_squeezed, _words(chat[turn]))
        ]:
            raise Refused(_another(text, until, turn, "up to its answer"))
        return len(head), stop + len(ending)

    def _marked(self, chat: Chat, turns: Sequence[int], template: str) -> tuple[str, list[Span]]:
        """The answers are what stands between ``{% generation %}`` and ``{% endgeneration %}``."""
        with _of_the_template():
            texts, marked = render_jinja_template(
                [chat],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        if len(marked[0]) != len(answers):
            raise Refused(
                f"has {len(answers)} messages of the assistant, but the chat template marks "
                f"{len(marked[0])} with {{% generation %}}: use a template that marks each once "
                "(--data.tokenizer_chat_template)"
            )
        span_of = dict(zip(answers, marked[0], strict=True))
        for turn in turns:
            written = texts[0][slice(*span_of[turn])]
            if missing := [words for words in _words(chat[turn]) if not _has(written, words)]:
                raise Refused(_dropped(missing[0], turn, written))
        return texts[0], [tuple(span_of[turn]) for turn in turns]

    def _lead(self, chat: Chat, turn: int, before: str, until: str) -> str:
        """What the template writes between the generation prompt and the record's words. Raises
        Refused: the words are not there."""
        written, words = until[len(before) :], _words(chat[turn])
        if len(words) < 2 and words == _words({"content": chat[turn]["content"]}):
            squeezed = _squeezed("".join(words))
            # the generation prompt may have written the tag already
            opened = _OPENING_TAG.match(squeezed)
            rests = [squeezed]
            if opened is not None and _squeezed(before).endswith(opened[0]):
                rests.append(squeezed[opened.end() :])
            if words and any(_squeezed(written).startswith(rest) for rest in rests):
                return ""
            mark = uuid4().hex
            marked = self._render([*chat[:turn], {**chat[turn], "content": mark}]).removeprefix(
                before
            )
            lead = marked.partition(mark)[0]
            if written.startswith(lead) and _squeezed(written[len(lead) :]).startswith(squeezed):
                return lead
            raise Refused(_dropped("".join(words), turn, written))
        if missing := [each for each in words if not _has(written, each)]:
            raise Refused(_dropped(missing[0], turn, written))
        return ""

    def _render(self, chat: Chat, *, generation: bool = False) -> str:
        with _of_the_template():
            return str(
                self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=generation
                )
            )


@contextmanager
def _of_the_template() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # templates raise what they like, and it is about the messages
        raise Refused(
            f"is rejected by the chat template: {type(error).__name__}: {error}"
        ) from error


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Whether it is the assistant's, and not marked as context: ``"weight": 0``, as OpenAI has it,
    or ``"train": false``."""
    return (
        message["role"] == "assistant"
        and message.get("weight") != 0
        and message.get("train") is not False
    )


def _words(message: Mapping[str, Any]) -> list[str]:
    """What a message says: its content, its reasoning, the tools that it calls, and the arguments
    of the calls."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    said = [
        message["content"],
        *(message.get(key) for key in _OTHER_WORDS),
        *(call.get("name") for call in calls),
    ]
    arguments = [word for call in calls for word in _argument_words(call.get("arguments"))]
    return [words for words in (*said, *arguments) if isinstance(words, str) and words.strip()]


def _argument_words(arguments: Any) -> list[str]:
    """Names, texts and whole numbers in arguments, or in their JSON text, as letters and digits
    alone: templates write JSON, XML, or what Python prints, each with escapes, and forms of 1e5, of
    its own."""
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        with suppress(InputError):
            arguments = decode(arguments, "")
    if isinstance(arguments, Mapping):
        arguments = [*arguments, *arguments.values()]
    if isinstance(arguments, list):
        return [word for each in arguments for word in _argument_words(each)]
    return (
        []
        if arguments is None or isinstance(arguments, (bool, float))
        else _WORD.findall(str(arguments))
    )


def _squeezed(text: str) -> str:
    """Without blanks and line ends: templates trim an answer, and put line ends around
    reasoning."""
    return "".join(text.split())


def _has(written: str, words: str) -> bool:
    return _squeezed(words) in _squeezed(written)


def _dropped(words: str, turn: int, written: str) -> str:
    return (
        f"message {turn + 1}: the chat template does not write the assistant's words "
        f"{words[:_SHOWN]!r}, but {written[:_SHOWN]!r}: use a template that does "
        "(--data.tokenizer_chat_template), or change the record"
    )


def _another(text: str, part: str, turn: int, what: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(text, part, strict=False)) if a != b),
        min(len(text), len(part)),
    )
    return (
        f"message {turn + 1}: the chat rendered {what} is not a prefix of the whole rendered chat: "
        f"{text[max(0, at - 20) : at]!r} is followed by {part[at : at + _SHOWN]!r}, but in the "
        f"whole chat by {text[at : at + _SHOWN]!r}; use a template that renders both the same, or "
        "marks answers with {% generation %} (--data.tokenizer_chat_template)"
    )
