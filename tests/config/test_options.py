from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from benchmarks.option_tables import format_markdown, format_schema
from openrlhf_ext.config import option_table
from openrlhf_ext.config.load import ConfigLoader
from openrlhf_ext.config.show import SCHEMA, modeline
from openrlhf_ext.config.upstream import STANDS_FOR
from openrlhf_ext.options.sections.algo import ESTIMATORS

FROZEN = Path(__file__).with_name("options.txt")
DOCUMENT = Path(__file__).parents[2] / "docs/reference/options.md"
CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [
    path
    for folder in ("", "recipes", "layouts")
    for path in (CONFIGS / folder).glob("*.yaml")
    if path.stem != "papers"
]
REFUSED = [name for name, option in option_table().items() if option.unsupported is not None]
OTHER_VALUE = {"integer": "77", "number": "0.125", "text": "other", "true or false": None}


def other_words(name: str) -> list[str]:
    """Words that set an option to something else than its default."""
    option = option_table()[name]
    if option.arity == "flag":
        return ["false" if option.default else "true"]
    if option.choices:
        return [next(choice for choice in option.choices if choice != option.default)]
    kind = next(kind for kind in OTHER_VALUE if kind in option.expects)
    return [OTHER_VALUE[kind]] * (2 if option.arity == "pair" else 1)


def test_the_names_are_frozen():
    """The flags are a public interface: users' scripts depend on them."""
    frozen = FROZEN.read_text().split()
    names = {
        name + (".*" if option.arity == "open" else "") for name, option in option_table().items()
    }
    # a new one is a new file in algorithms/methods, and no more
    methods = {f"algo.{name}.*" for name in ESTIMATORS}
    assert sorted(names - set(frozen) - methods) == [], (
        "new options: add them to tests/config/options.txt"
    )
    assert sorted(set(frozen) - names) == [], (
        "removed options: users' scripts break; deprecate first"
    )
    assert frozen == sorted(frozen)


def test_the_document_holds_the_current_table():
    assert DOCUMENT.read_text() == format_markdown(), (
        f"put the output of `python benchmarks/option_tables.py` in {DOCUMENT}"
    )


def test_the_schema_is_current():
    assert SCHEMA.read_text() == format_schema(), (
        f"put the output of `python benchmarks/option_tables.py --schema` in {SCHEMA}"
    )


@pytest.fixture(scope="module")
def faults():
    """What an editor would mark in the text of a YAML file."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.check_schema(validator.schema)
    return lambda text: [
        error.message for error in validator.iter_errors(yaml.load(text, ConfigLoader))
    ]


def test_every_file_names_the_schema_and_holds(faults):
    for file in FILES:
        text = file.read_text()
        assert text.startswith(modeline(file)) and faults(text) == [], file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("actor: {model: m}", "'model' does not match"),
        ("actor.adam.lr: fast", "'fast' is not of type 'number'"),
        ("algo: {advantage.estimator: grpoo}", "'grpoo' is not one of ['cispo', "),
        ("algo: {dapo: {clip_hgh: 1}}", "'clip_hgh' does not match"),
        ("algo.grpo.length_penalty.lmax: 1", "'algo.grpo.length_penalty.lmax' does not match"),
        ("train.batch_size: 0", "0 is less than the minimum of 1"),
    ],
)
def test_the_schema_refuses_what_a_run_would(faults, text, says):
    (message,) = faults(text)
    assert says in message


def test_the_schema_has_meaning_and_default_of_every_option():
    schema = json.loads(SCHEMA.read_text())
    for name, option in option_table().items():
        about = schema
        for key in (
            schema["patternProperties"]
            .get(f"^{re.escape(name)}$", {"$ref": f"#/properties/{name}"})["$ref"][2:]
            .split("/")
        ):
            about = about[key]
        if option.unsupported is not None:
            assert about["deprecated"] and option.unsupported.instead in about["description"]
        elif option.arity != "open":
            assert about["description"] == option.help, name
            # none where a run makes it
            assert about.get("default") == json.loads(json.dumps(option.default)), name


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in STANDS_FOR])
def test_what_is_not_built_is_refused_and_what_means_nothing_here_is_a_line(name, problems, load):
    words = other_words(name)
    if option_table()[name].unsupported.yet:
        (message,) = problems(f"--{name}", *words)
    else:
        (message,) = load(f"--{name}", *words).warnings
    assert (
        message.startswith(f"{name} is not ") and f"got {' '.join(words)} (command line)" in message
    )
    default = option_table()[name].shown_default
    assert problems(f"--{name}", *default.split(" ")) == [] and load().warnings == ()


def test_inert_values_besides_the_default(problems):
    assert problems("--actor.entropy_coef", "0", "--ds.lora.target_modules", "all-linear") == []


def test_refusals_name_the_option_to_use_instead():
    table = option_table()
    for name, ours in (
        ("ds.tensor_parallel_size", "megatron.tensor_parallel_size"),
        ("ds.param_dtype", "megatron.param_dtype"),
        ("ds.ring_attn_size", "megatron.context_parallel_size"),
        ("ds.zero_stage", "megatron.distributed_optimizer_enable"),
    ):
        assert ours in table[name].unsupported.instead


def test_every_option_says_what_it_means():
    for option in option_table().values():
        assert len(option.help) > 3 and not option.help.endswith("."), option.name


def test_options_in_units_say_which():
    for name, option in option_table().items():
        if name.endswith("_s") and option.arity == "one":
            assert "seconds" in option.help, name
        if name.endswith("_mib"):
            assert "MiB" in option.help, name


def test_the_nearest_option_is_never_one_that_is_refused():
    for name in REFUSED:
        nearest = option_table().nearest(name + "x")
        assert nearest is None or option_table().find(nearest).unsupported is None


def test_nothing_is_near_nonsense():
    assert option_table().nearest("qqqqqqqq") is None
