"""The one door for files that a user brings: whatever is in them, reading ends well or in an
InputError, and soon.

10,000 mutations of good files of every kind; ``OPENRLHF_EXT_MUTATIONS=200000`` makes as many, from
another seed each time (``--hypothesis-seed=7``: from this one).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from openrlhf_ext.checkpoints.store import CheckpointStore
from openrlhf_ext.cli import convert, evaluate, report, train_ppo_ray
from openrlhf_ext.config import ConfigError, load_config
from openrlhf_ext.config.files import DatasetRef, parameter_count
from openrlhf_ext.config.records import Wanted, open_source, scan_records
from openrlhf_ext.config.tokenizers import tokenizer_difference, tokenizer_fault
from openrlhf_ext.inputs import InputError, decode
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint, WeightMapError, finish_interrupted
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.tools.evaluate.problems import (
    Problem,
    Store,
    load_benchmark,
    load_completions,
    load_problems,
)
from openrlhf_ext.tools.evaluate.request import Request
from openrlhf_ext.tools.explain.rollouts import read_rollouts
from openrlhf_ext.tools.plan.translate import translate
from openrlhf_ext.tools.report.page import page_data, read_runs
from openrlhf_ext.tools.text_model import write_text_model
from tests.cli.test_convert_text import publish
from tests.config.test_file_rules import write_records
from tests.models import make_tiny_policy, save_tensors
from tests.tools.evaluate.test_store import RESULTS, SETTINGS
from tests.tools.report.runs import make_run

ASKED = os.environ.get("OPENRLHF_EXT_MUTATIONS")
MUTATIONS = int(ASKED or 10_000)
COMMANDS = MUTATIONS // 20  # through a whole command each
LONGEST_S = 30  # of one mutation; they take milliseconds

BOMB = (
    "[&a [1,1,1,1,1,1,1,1,1,1], "
    + ", ".join(
        f"&{new} [{','.join([f'*{old}'] * 10)}]"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "]"
)
HOSTILE = [
    text.encode("utf-8", "surrogatepass")
    for text in (
        "null",
        "true",
        "[]",
        "{}",
        "1e999",
        "-1",
        "0",
        "1" + "0" * 30,
        "9" * 5000,
        "NaN",
        "1.5",
        "2147483648",
        '""',
        '"\\ud800"',
        '"\\u0000"',
        "\0",
        "\ufeff",
        "\ud800",
        "[" * 3000,
        '{"a":' * 3000,
        '"../../x"',
        '"/etc/passwd"',
        '"',
        "'",
        "\n",
        ",",
        ":",
        "!!int abc",
        "!!python/object/apply:os.system [true]",
        "!!timestamp 2020-01-01",
        "&a [*a]",
        "&a {b: *a}",
        "*a",
        "<<: {a: 1}",
        "? [1]\n: 2",
        "- ",
        "\t",
        "%",
        '"' + "x" * 5000 + '"',
        "x" * 300,
        '[1, "a", null]',
        '{"a": {"b": [1]}}',
        "1_000",
        "None",
        BOMB,
    )
] + [b"\xff\xfe", b"\x80", b"PAR1", b"\xff" * 8]
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+')


def mutated(good: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    """``good`` after these changes: what, where (0 to 1), and which of the hostile texts or how
    many bytes."""
    for change, where, number in changes:
        at, hostile = int(where * len(good)), HOSTILE[number % len(HOSTILE)]
        if change == "cut":
            good = good[:at]
        elif change == "flip":
            good = good[:at] + bytes([number]) + good[at + 1 :]
        elif change == "drop":
            good = good[:at] + good[at + number :]
        elif change == "insert":
            good = good[:at] + hostile + good[at:]
        elif (token := TOKEN.search(good, at)) is not None:
            good = good[: token.start()] + hostile + good[token.end() :]
    return good


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["replace", "replace", "replace", "insert", "flip", "cut", "drop"]),
        st.floats(0, 1),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
)


class TooLong(BaseException):
    """Nothing handles this."""


@contextmanager
def soon() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooLong(f"a mutation took more than {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- good files of every kind


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good file of every kind, and a model, a sharded one, and a run."""
    folder = tmp_path_factory.mktemp("good")
    make_tiny_policy(folder / "model")
    tensors = load_file(folder / "model/model.safetensors")
    save_tensors(tensors, folder / "model", folder / "sharded", max_shard_bytes=100_000)
    publish(folder / "published", "qwen3_5")
    records = [{"question": f"{i}+1=", "answer": f"{i + 1}", "source": "x"} for i in range(12)]
    for name in (
        "data.jsonl",
        "lines.json",
        "array.json",
        "data.csv",
        "data.parquet",
        "data.arrow",
    ):
        write_records(folder / name, records)
    write_records(
        folder / "aime.jsonl", [{"problem": r["question"], "answer": r["answer"]} for r in records]
    )
    write_records(
        folder / "saved.jsonl", [{"problem": i, "completions": ["1", "2"]} for i in range(12)]
    )
    # relative: a part of an absolute path is a folder of all tests, and a search of it takes
    # minutes
    (folder / "run.yaml").write_text(
        "# a run\nactor:\n  model_name_or_path: model\n  num_gpus_per_node: 2\n  adam: {lr: "
        "1e-6, betas: [0.9, 0.99]}\nrollout: {batch_size: 4, n_samples_per_prompt: 4, "
        "max_new_tokens: 16}\ntrain.batch_size: 16\ndata:\n  prompt_dataset: data.jsonl\n  "
        "input_key: question\n  label_key: answer\n  max_len: 64\nreward.remote_url: "
        "http://localhost:1/grade\nalgo:\n  advantage:\n    estimator: gtpo_entropy\n  "
        "gtpo_entropy: {alpha1: 1.0}\nckpt: {output_dir: out, path: ckpt, save_steps: 5}\n"
        "megatron.param_dtype: fp32\n"
    )
    (folder / "verl.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {train_files: [a, b], x: 1, seed: "
        "'${actor_rollout_ref.rollout.n}'}\nactor_rollout_ref: {rollout: {n: '${data.x}'}}\n"
    )
    (folder / "trl.yaml").write_text(
        "learning_rate: 1e-6\nloss_type: dapo\nbeta: 0.1\nnum_generations: 4\n"
    )
    make_run(folder / "run", 10, samples=False)
    make_run(folder / "sampled", 1)
    shutil.copy(folder / "sampled/samples.jsonl", folder / "rollouts.jsonl")
    settings_path = folder / "model/tokenizer_config.json"
    template = {"chat_template": "{{ messages[0].content }}"}
    settings_path.write_text(json.dumps(json.loads(settings_path.read_text()) | template, indent=1))
    with Store(folder / "store.jsonl", SETTINGS) as store:
        store.append(RESULTS)
    sample = {"prompt": "1+1", "completion": "2", "score": 1.0}
    (folder / "before.json").write_text(
        json.dumps(
            {
                "accuracy": 0.5,
                "standard_error": 0.1,
                "prompts": 12,
                "samples_per_prompt": 4,
                "score_mean": 0.5,
                "sample_answers": [sample],
            },
            indent=1,
        )
    )
    CheckpointStore(folder, 3).mark_best({"step": 3, "metric": "eval/accuracy", "value": 0.5})
    (folder / "out/.complete").mkdir(parents=True)
    (folder / "out/.complete/files.json").write_text(
        json.dumps({"config.json": 2, "model.safetensors": 9})
    )
    return folder


def read_configuration(path: Path) -> None:
    try:
        with chdir(path.parent):
            load_config(["--config", str(path)])
    except ConfigError as error:
        # rules between options need not name the file
        raise InputError(f"{path.name}: {error}") from error


def read_data(path: Path) -> None:
    source = open_source(DatasetRef(str(path), None), "train")
    scan_records(source, Wanted("question", "answer"))
    scan_records(source, Wanted("question", chat=True))


def read_weights(path: Path) -> None:
    parameter_count(str(path.parent))
    checkpoint = HFCheckpoint(path.parent)
    for name in sorted(checkpoint.names)[:2]:
        checkpoint.header(name)
        checkpoint.read(name)


def read_published(path: Path) -> None:
    try:
        write_text_model(path.parent, path.parents[1] / "text")
    except WeightMapError as error:
        raise InputError(str(error)) from error


def read_tokenizer(path: Path) -> None:
    tokenizer_difference(str(path.parent), str(path.parents[1] / "sharded"))
    if (fault := tokenizer_fault(str(path.parent), chat=True)) is not None:
        raise InputError(fault)


def read_run(path: Path) -> None:
    page_data(read_runs([path.parent]), None, time.time)
    copy = path.with_name("copy.jsonl")
    shutil.copy(path, copy)
    for goes_on in (True, False):
        with EventLog(copy, goes_on) as log:
            log.repeat_from(5)
    for left in path.parent.glob("copy.jsonl*"):
        left.unlink()


def finish_export(path: Path) -> None:
    beside = {p for p in path.parents[2].iterdir()}
    complete = path.parent
    try:
        finish_interrupted(path.parents[1])
    finally:
        assert {p for p in path.parents[2].iterdir()} == beside, "nothing is written outside"
        complete.mkdir(exist_ok=True)


def read_store(path: Path) -> None:
    with Store(path, SETTINGS):
        pass


KINDS: dict[str, Callable[[Path], Any]] = {
    "run.yaml": read_configuration,
    **dict.fromkeys(
        ["data.jsonl", "array.json", "data.csv", "data.parquet", "data.arrow"], read_data
    ),
    **dict.fromkeys(["verl.yaml", "trl.yaml"], lambda path: translate([path.stem, str(path)])),
    "model/config.json": lambda path: read_model_shape(path.parent),
    "published/config.json": read_published,
    **dict.fromkeys(["model/tokenizer.json", "model/tokenizer_config.json"], read_tokenizer),
    **dict.fromkeys(
        ["model/model.safetensors", "sharded/model.safetensors.index.json"], read_weights
    ),
    **dict.fromkeys(
        ["run/metrics.jsonl", "run/events.jsonl", "run/ledger.jsonl", "sampled/samples.jsonl"],
        read_run,
    ),
    "rollouts.jsonl": read_rollouts,
    "data.jsonl as problems": load_problems,
    "aime.jsonl": lambda path: load_benchmark("aime24", path),
    "saved.jsonl": lambda path: load_completions(
        path, [Problem(i, f"{i}+1=", "") for i in range(12)]
    ),
    "store.jsonl": read_store,
    "before.json": lambda path: Request(Evaluate(compare=str(path))).before,
    "best.json": lambda path: CheckpointStore(path.parent, 3).best(),
    "out/.complete/files.json": finish_export,
}
# what is wrong with these is said, and no more
LEFT_OUT = {"run/events.jsonl", "run/ledger.jsonl", "sampled/samples.jsonl", "best.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_any_file_is_read_or_refused_with_its_name(good: Path, kind: str) -> None:
    path = good / kind.partition(" as ")[0]
    content = path.read_bytes()
    seen = {"read": 0, "refused": 0}

    @settings(max_examples=MUTATIONS // len(KINDS), derandomize=ASKED is None, database=None)
    @given(CHANGES)
    def try_one(changes: list[tuple[str, float, int]]) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(mutated(content, changes))
        try:
            with soon():
                KINDS[kind](path)
            seen["read"] += 1
        except InputError as error:
            assert path.name in str(error) or path.parent.name in str(error), error
            seen["refused"] += 1

    try:
        KINDS[kind](path)
        try_one()
    finally:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert seen["read"] > 0 and (seen["refused"] > 0) == (kind not in LEFT_OUT), seen


# ---- through the commands


def train(good: Path) -> int:
    with chdir(good):
        return train_ppo_ray.main(["--config", "run.yaml", "--dry_run"])


def evaluation(good: Path) -> int:
    files = ["--benchmark", f"aime24={good}/aime.jsonl", "--compare", str(good / "before.json")]
    return evaluate.main([*files, "--model", str(good / "model"), "--n", "2"])


def saved(good: Path) -> int:
    return evaluate.main(
        ["--benchmark", f"aime24={good}/aime.jsonl", "--completions", str(good / "saved.jsonl")]
    )


def conversion(good: Path) -> int:
    return convert.main(["--check", str(good / "sharded")])


def page(good: Path) -> int:
    return report.main([str(good / "run"), "--output", str(good / "page.html")])


THROUGH: list[tuple[Callable[[Path], int], list[str]]] = [
    (
        train,
        [
            "run.yaml",
            "data.jsonl",
            "model/config.json",
            "model/model.safetensors",
            "model/tokenizer.json",
        ],
    ),
    (evaluation, ["aime.jsonl", "before.json", "model/config.json", "model/tokenizer_config.json"]),
    (saved, ["saved.jsonl"]),
    (conversion, ["sharded/config.json", "sharded/model.safetensors.index.json"]),
    (page, ["run/metrics.jsonl", "run/events.jsonl", "run/ledger.jsonl"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [command for command, _ in THROUGH], ids=lambda command: command.__name__
)
def test_a_command_ends_with_0_or_2(good: Path, command: Callable, monkeypatch, capsys) -> None:
    """Up to where a model would be loaded, or processes started."""
    monkeypatch.setattr("openrlhf_ext.cli.evaluate._results", lambda request: [])
    monkeypatch.setattr("openrlhf_ext.cli.evaluate._finish", lambda request, results: 0)
    monkeypatch.setattr(
        "openrlhf_ext.tools.plan.conversion_check.check_conversion", lambda settings: Passed()
    )
    names = dict(THROUGH)[command]
    contents = {name: (good / name).read_bytes() for name in names}
    seen = {0: 0, 2: 0}

    @settings(max_examples=COMMANDS // len(THROUGH), derandomize=ASKED is None, database=None)
    @given(st.sampled_from(names), CHANGES)
    def try_one(name: str, changes: list[tuple[str, float, int]]) -> None:
        (good / name).write_bytes(mutated(contents[name], changes))
        try:
            with soon():
                status = command(good)
        finally:
            (good / name).write_bytes(contents[name])
        told = capsys.readouterr()
        assert status in (0, 2) and "Traceback" not in told.err, told.err
        assert status == 0 or told.err.strip(), "it says why"
        seen[status] += 1

    assert command(good) == 0, capsys.readouterr().err
    try_one()
    assert min(seen.values()) > 0, seen


def test_a_line_that_is_cut_off_has_one_line_number() -> None:
    with pytest.raises(InputError, match=r"^line 24: not JSON \(Expecting value at column 6\)$"):
        decode(b'{"a":\n', "line 24")
    with pytest.raises(InputError, match=r"^line 24: not JSON "):
        decode('{"a": 1}\v', "line 24")


def test_what_only_transformers_refuses_in_config_json_ends_with_2(good: Path, capsys) -> None:
    path = good / "model/config.json"
    content = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(content) | {"initializer_range": [1]}))
        assert train(good) == 2
    finally:
        path.write_text(content)
    assert f"{path} cannot be read by transformers: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "header", [b'{"a": [1]}', b'{"a": {"dtype": "F32", "shape": ["x"]}}', b"[]", b"{" * 99]
)
def test_odd_headers_are_said_with_their_file_also_where_checkpoints_are_saved(
    good: Path, header: bytes, capsys
) -> None:
    path = good / "model/model.safetensors"
    content = path.read_bytes()
    try:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert train(good) == 2
    finally:
        path.write_bytes(content)
    assert (
        f"actor.model_name_or_path: {path} cannot be read as safetensors: "
        in capsys.readouterr().err
    )


class Passed(SimpleNamespace):
    """What a check of a conversion found."""

    different = missing = ()
    tensors = parameters = 1
    max_logprob_difference = mean_logprob_difference = 0.0
    seconds: dict[str, float] = {}

    def passed(self, tolerance: float) -> bool:
        return True
