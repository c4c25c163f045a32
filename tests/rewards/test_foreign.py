"""Reward functions as verl's and TRL's documentation and examples write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.rewards.grading import InvalidAnswer, RewardResult, parse_answer
from openrlhf_ext.rewards.worker import call_reward, load_reward_function
from openrlhf_ext.user_code import told


@pytest.fixture
def graded(tmp_path: Path) -> Any:
    """``graded(source, label, completion)``: the grade by the function of a file."""

    def grade(source: str, label: Any = "4", completion: str = "#### 4") -> RewardResult:
        path = tmp_path / "rewards.py"
        path.write_text(source)
        function = load_reward_function(str(path))
        return parse_answer(call_reward(function, "2+2=" + completion, "2+2=", label, completion))

    return grade


VERL = "def {}(data_source, solution_str, ground_truth, extra_info=None):\n    {}\n"
EQUAL = "solution_str == '#### ' + ground_truth"


@pytest.mark.parametrize("name", ["compute_score", "reward_func", "my_reward"])
def test_verls_function_gets_completion_and_label(graded, name):
    assert graded(VERL.format(name, f"return {EQUAL}")).reward == 1
    assert graded(VERL.format(name, f"return {EQUAL}"), label="5").reward == 0


def test_verls_dict_has_score_accuracy_and_logs(graded):
    found = graded(
        VERL.format(
            "compute_score", "return {'score': -1.0, 'acc': True, 'pred': 'x', 'format': 0.5}"
        )
    )
    assert (found.reward, found.score, found.extra_logs) == (-1.0, 1.0, {"format": 0.5})
    with pytest.raises(InvalidAnswer, match=r"without the key 'score'; its keys are \['value'\]"):
        graded(VERL.format("compute_score", "return {'value': 1}"))


def test_verls_functions_of_a_list_keep_accuracy_and_logs(graded):
    two = VERL.format("a", "return {'score': -1.0, 'acc': 1, 'length': 3}") + VERL.format(
        "b", "return 0.5"
    )
    found = graded(two + "reward_funcs = [a, b]\n")
    assert (found.reward, found.score, found.extra_logs) == (-0.5, 1.0, {"length": 3.0})


def test_verls_other_columns_are_keys_of_the_label(graded):
    source = VERL.format(
        "compute_score", "return len(data_source) + extra_info['index'] + (ground_truth == '4') / 2"
    )
    assert (
        graded(
            source, {"data_source": "abc", "ground_truth": "4", "extra_info": {"index": 10}}
        ).reward
        == 13.5
    )
    with pytest.raises(
        InvalidAnswer, match="needs data_source, and a run hands on one column, the label"
    ):
        graded(source)
    reward_model = {"style": "rule", "ground_truth": "4"}  # as verl's prepared data have it
    assert graded(VERL.format("compute_score", f"return {EQUAL}"), reward_model).reward == 1
    none = VERL.format("compute_score", "return float(extra_info is None)")
    assert graded(none).reward == 1, (
        "its default; the line says that it is given where the label has it"
    )


@pytest.mark.parametrize(
    "head",
    [
        "def reward_len(completions, answer, **kwargs):",
        "def reward_len(prompts, completions, answer, **kwargs):",
        "def reward_len(*, completions, answer):",
        "def reward_len(completions, answer, weight=0.5, trainer_state=None, **kwargs):",
        "async def reward_len(completions, answer, **kwargs):",
        "def reward_len(completions, **kwargs):\n    answer = kwargs['answer']",
        "def reward_len(completions, **kwargs):\n    answer = kwargs.get('answer')",
        "def reward_len(completions, answer=None):",
    ],
)
def test_trls_function_gets_lists_of_one(graded, head):
    body = (
        "\n    return [1.0 if c == '#### ' + a else 0.25 for c, a in zip(completions, answer, "
        "strict=True)]\n"
    )
    assert graded(head + body).reward == 1
    assert graded(head + body, label="5").reward == 0.25
    assert graded(head + body, label={"answer": "4", "level": 3}).reward == 1


RIGHT = "[float('4' in {}) for one in completions]"


@pytest.mark.parametrize(
    ("head", "text", "form"),
    [
        ("", "one", "texts"),
        ("", "one[0]['content']", "messages"),
        ("", "one[0].get('content')", "messages"),
        # in another function of the file
        ("words = lambda one: one[-1]['content']\n", "words(one)", "messages"),
        ("import json\n", "str(json.loads(one)['content'])", "texts"),  # of a JSON answer
        ("", "(one if isinstance(one, str) else one[0]['content'])", "texts"),
        (
            "completions = 'messages'\n",
            "(one if isinstance(one, str) else one[0]['content'])",
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("is_lenient", [False, True])
def test_texts_or_messages_are_what_works(tmp_path, head, text, form, is_lenient):
    """Also where a function counts what it cannot read as 0."""
    source = f"{head}def f(completions, prompts, **kwargs):\n    return {RIGHT.format(text)}\n"
    if is_lenient:
        right = f"    try:\n        return {RIGHT.format(text)}\n"
        source = (
            source.replace(f"    return {RIGHT.format(text)}\n", right) + "    except Exception:\n"
        )
        source += "        return [0.0] * len(completions)\n"
    (tmp_path / "rewards.py").write_text(source)
    function = load_reward_function(str(tmp_path / "rewards.py"))
    completion = '{"content": 4}' if "json" in head else "#### 4"
    assert call_reward(function, "", "2+2=", "4", completion) == {"rewards": 1}
    assert function.said.endswith(f"completions are {form}")


def test_where_nothing_tells_texts_from_messages_the_file_has_to(graded):
    """A length of both, and a function that is the same to every completion made for the trial."""
    bodies = (
        "[len(str(one)) for one in completions]  # content",
        "[float(one == 'content') for one in completions]",
    )
    for body in bodies:
        source = f"def f(completions, **kwargs):\n    return {body}\n"
        with pytest.raises(
            InvalidAnswer, match='nothing tells .*Write a line completions = "texts" or'
        ):
            graded(source)
        assert graded(source + "completions = 'texts'\n").reward in (6, 0)
        assert graded(source.replace("content", "words")).reward in (6, 0), (
            "nobody reads a message without that word"
        )
    with pytest.raises(TypeError, match='completions must be "texts" or "messages": got \'text\''):
        graded(source + "completions = 'text'\n")


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ("**kwargs", "(kwargs.get('solution') or kwargs.get('answer') or [''])[0]"),
        ("**kwargs", "[*kwargs.values()][0][0]"),
        ("**kwargs", "dict(**kwargs).get('answer', [''])[0]"),
        ("**kwargs", "next((kwargs[name] for name in kwargs if name != 'prompts'), [''])[0]"),
        ("answer='', solution=None", "(answer or solution or [''])[0]"),
    ],
)
def test_a_label_that_would_reach_nobody_is_an_error(graded, parameters, body):
    source = (
        f"def f(completions, {parameters}):\n    return [float('4' == {body})]\ncompletions = "
        "'texts'\n"
    )
    with pytest.raises(InvalidAnswer, match="would never see the label '4': it may read it as"):
        graded(source)
    assert graded(source, {"answer": "4"}).reward == 1, "an object's keys are the columns"
    assert graded(source + "label_column = 'answer'\n").reward == 1
    assert graded(source + "label_column = None\n").reward == 0


def test_an_object_that_is_called_is_read_as_a_function_is(graded):
    source = (
        "class Right:\n    def __call__(self, completions, **kwargs):\n        {}\nreward_func = "
        "Right()\n"
    )
    assert graded(source.format("return [float(kwargs['answer'] == ['4'])]")).reward == 1
    assert graded(source.format("return [1.0]")).reward == 1, "which needs no label"
    with pytest.raises(InvalidAnswer, match="would never see the label"):
        graded(source.format("return [float('4' in next(iter(kwargs.values())))]"))


@pytest.mark.parametrize("parameters", ["answer=''", "answer=[]", "**kwargs"])
def test_a_label_reaches_the_only_column_that_there_is(graded, parameters):
    read = "kwargs.pop('answer')" if "kwargs" in parameters else "answer"
    assert (
        graded(
            f"def f(completions, most=9, {parameters}):\n    return [float({read} == ['4'])]\n"
        ).reward
        == 1
    )


@pytest.mark.parametrize(
    "head", ["completions", "completions, **kwargs", "completions, prompts, least=3, **kwargs"]
)
def test_a_function_that_reads_no_column_needs_no_label(graded, head):
    source = (
        f'def f({head}):\n    """kwargs are left alone."""\n    return [float(len(one)) for one '
        "in completions]\n"
    )
    for label in ("4", "", {"ground_truth": "4"}, 4):
        assert graded(source, label).reward == 6


def test_verl_has_no_null_where_an_answer_stands(graded):
    source = VERL.format("compute_score", "return float(str(ground_truth) in solution_str)")
    with pytest.raises(InvalidAnswer, match="needs ground_truth, and a run hands on one column"):
        graded(source, {"ground_truth": None})


def test_verls_kwargs_are_all_that_it_hands_on(graded):
    source = (
        "def compute_score(solution_str, **kwargs):\n    return inner(solution_str, **kwargs)\n"
    )
    inner = (
        "def inner(text, ground_truth, data_source, extra_info):\n    return float(ground_truth in "
        "text)\n"
    )
    assert graded(inner + source).reward == 1
    assert (
        graded(
            VERL.format("compute_score", "return 1.0").replace("=None", "=None, method='strict'")
        ).reward
        == 1
    )


def test_trls_several_columns_are_keys_of_the_label(graded):
    source = (
        "def f(completions, low, high, **kwargs):\n    return [low[0] + high[0] + len(kwargs)]\n"
    )
    assert graded(source, {"low": 1, "high": 2, "more": 0}).reward == 3 + 2, "prompts and more"
    with pytest.raises(
        InvalidAnswer, match="needs high, low, and .* object with the keys high, low"
    ):
        graded(source)


def test_trls_functions_are_summed_without_those_that_say_none(graded):
    both = (
        "def right(completions, answer, **kwargs):\n    return [2.0]\n"
        "def other(completions, **kwargs):\n    return [None]\n"
    )
    with pytest.raises(
        AttributeError, match="defines no function reward_func; .*one of right, other, or list them"
    ):
        graded(both)
    assert graded(both + "reward_funcs = [right, other]\nreward_weights = [0.5, 3.0]").reward == 1
    assert graded(both + "reward_func = right").reward == 2
    with pytest.raises(InvalidAnswer, match="returned rewards = 'None'"):
        graded(both + "reward_func = other")
    with pytest.raises(TypeError, match="1 numbers for 2 reward_funcs"):
        graded(both + "reward_funcs = [right, other]\nreward_weights = [0.5]")
    with pytest.raises(TypeError, match="in TRL's or verl's form: got 'some/model'"):
        graded("reward_funcs = ['some/model']")


@pytest.mark.parametrize(
    "head", ["completions, completion_ids", "completions, answer, log_metric, **kwargs"]
)
def test_what_nobody_has_is_refused_by_name(graded, head):
    with pytest.raises(
        InvalidAnswer,
        match="needs (completion_ids|log_metric), .*give what nobody has here a default",
    ):
        graded(f"def f({head}):\n    return [0.0]\n")
    assert (
        graded(
            f"def f({head}=None):\n    return [0.0]\n".replace(", **kwargs=None", "=None")
        ).reward
        == 0
    )


def test_two_rewards_for_one_completion_are_refused(graded):
    with pytest.raises(InvalidAnswer, match="returned 2 rewards for 1 completions"):
        graded("def f(completions, **kwargs):\n    return [0.0, 1.0]\n")


def test_our_own_form_comes_first_and_may_be_async(graded):
    own = (
        "async def reward_func(queries, prompts, labels, completions):\n    return {'rewards': "
        "len(labels[0])}\n"
    )
    assert graded(own).reward == 1
    beside = "def helper(completions, **kwargs):\n    return [5.0]\n"
    assert graded(own + beside).reward == 1


def test_a_file_of_a_relative_path_is_told_of_by_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(
        "from pathlib import Path\nFOLDER = Path(__file__).parent\nFOLDER / 1\n"
    )
    with pytest.raises(TypeError) as error:
        load_reward_function("rewards.py")
    assert f'File "{tmp_path}/rewards.py", line 3' in told(error.value)


def test_an_edit_of_one_second_and_one_length_is_seen(tmp_path: Path) -> None:
    """Python itself would run the bytecode of the first file."""
    path = tmp_path / "rewards.py"
    for value in (0.5, 0.8):
        path.write_text(
            "def reward_func(queries, prompts, labels, **kwargs):\n    return {'rewards': "
            f"{value}}}\n"
        )
        os.utime(path, (1e9, 1e9))
        assert load_reward_function(str(path))([], [], [])["rewards"] == value
    assert [*tmp_path.iterdir()] == [path], "nothing is written beside a user's file"


def test_verls_own_signature_needs_nothing_but_the_label(tmp_path):
    """``extra_info`` has a default there, and the function lives with None."""
    path = tmp_path / "verl.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, "
        "strict=True, **kwargs):\n    return float(ground_truth in solution_str) + (extra_info "
        "or {}).get('index', -1)\n"
    )
    function = load_reward_function(str(path))
    assert function(["q"], ["p"], ["4"], ["x=4"]) == [{"rewards": 0.0}]
