"""Problem files from the package reasoning-gym: a family of procedural tasks, its difficulty as
parameters.

    python examples/python/gym_task.py --output_dir data/                                  # small
    sums and differences python examples/python/gym_task.py --output_dir data/ --family chain_sum
    --set max_terms=3 max_digits=2 python examples/python/gym_task.py --output_dir data/ --family
    gcd --set max_value=30

``train.jsonl`` and ``heldout.jsonl`` hold ``question`` and ``answer``, a number, which
reward_gsm8k.py grades. Which of the two a question belongs to is decided by a hash of what is asked
(the expression, where the family says it): nothing that is held out is ever trained, however it is
worded. Held-out problems are asked once; training draws as the family does, with repeats where it
has few.

The wheel is fetched by checksum (real_model.py) and imported from where it lies: a family of
numbers needs nothing but PyYAML, the other families' packages, three of which need a compiler, are
not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from real_model import NotFetched, wheel
from toy_policy import default_cache_dir

from openrlhf_ext.outputs import in_one_piece

PACKAGE = "reasoning-gym==0.1.25"
SMALL_SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "format_style": "natural",
}
"""basic_arithmetic of two numbers from 0 to 10: 242 expressions, each worded in four ways."""
HELDOUT_SHARE = 4  # one expression in four
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
MAX_MISSES_IN_A_ROW = 2000


class Refused(ValueError):
    """What was asked for cannot be made; the message says what and why."""


def family(name: str, path: Path, settings: Mapping[str, Any]) -> Any:
    """The endless data set of a family, from the wheel at ``path``; item i is drawn with seed + i.
    Raises Refused."""
    with zipfile.ZipFile(path) as files:
        found = [
            file
            for file in files.namelist()
            if re.fullmatch(rf"reasoning_gym/(\w+)/({name}/)?{name}\.py", file)
        ]
    if not found:
        raise Refused(f"--family: {PACKAGE} has no family {name!r}")
    # its own __init__ files import every family, with the packages that they need
    if "reasoning_gym" not in sys.modules:
        sys.path.append(str(path))
    room = found[0].split("/")[1]
    for shell in ("reasoning_gym", f"reasoning_gym.{room}"):
        module = sys.modules.setdefault(shell, ModuleType(shell))
        module.__path__ = [f"{path}/{shell.replace('.', '/')}"]
    try:
        # before factory, which it imports and which imports it
        importlib.import_module("reasoning_gym.coaching")
        importlib.import_module(found[0].removesuffix(".py").replace("/", "."))
        return importlib.import_module("reasoning_gym.factory").create_dataset(name, **settings)
    except ImportError as error:
        raise Refused(f"--family {name} needs a package that is not installed: {error}") from error
    except (TypeError, AssertionError, ValueError) as error:
        raise Refused(
            f"--set: {name} of {PACKAGE} does not take {dict(settings)}: {error}"
        ) from error


def problems(data: Any, heldout: bool) -> Iterator[dict[str, str]]:
    """Endless problems of one split, repeats included. Raises Refused: an answer is no number."""
    index = 0
    while True:
        item = data[index]
        index += 1
        if not NUMBER.fullmatch(item["answer"]):
            raise Refused(
                "--family: only families of numbers are graded here; an answer was "
                f"{item['answer']!r}"
            )
        asked = str(item["metadata"].get("expression", item["question"]))
        digest = hashlib.sha256(asked.encode()).digest()
        if (digest[0] % HELDOUT_SHARE == 0) == heldout:
            yield {"question": item["question"], "answer": item["answer"]}


def distinct(stream: Iterator[dict[str, str]], count: int) -> list[dict[str, str]]:
    """The first ``count`` different questions. Raises Refused: the stream has hardly any more."""
    found: dict[str, dict[str, str]] = {}
    misses = 0
    while len(found) < count:
        problem = next(stream)
        misses = misses + 1 if problem["question"] in found else 0
        if misses > MAX_MISSES_IN_A_ROW:
            raise Refused(
                f"--heldout_size: the family has hardly more than {len(found)} held-out problems"
            )
        found.setdefault(problem["question"], problem)
    return list(found.values())


def write_task(folder: Path, data: Any, train_size: int, heldout_size: int) -> None:
    """Writes ``train.jsonl`` and ``heldout.jsonl``."""
    stream = problems(data, heldout=False)
    splits = {
        "train": [next(stream) for _ in range(train_size)],
        "heldout": distinct(problems(data, heldout=True), heldout_size),
    }
    for name, records in splits.items():
        with in_one_piece(folder / f"{name}.jsonl") as partial:
            partial.write_text(
                "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
            )


def _settings(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise Refused(f"--set takes NAME=VALUE: got {', '.join(wrong)}")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status, 2 if something given is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output_dir", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    add("--family", default="basic_arithmetic", help="task of reasoning-gym, its answers numbers")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="the family's parameters (default: "
        "the package's; for basic_arithmetic two numbers up to 10, + and -)",
    )
    add("--train_size", type=int, default=4096, help="problems in train.jsonl")
    add("--heldout_size", type=int, default=64, help="problems in heldout.jsonl")
    add("--seed", type=int, default=42, help="same seed, same files")
    add("--cache_dir", type=Path, default=default_cache_dir(), help="cache (or OPENRLHF_EXT_CACHE)")
    arguments = parser.parse_args(argv)
    try:
        settings = (SMALL_SUMS if arguments.family == "basic_arithmetic" else {}) | _settings(
            arguments.set
        )
        path = wheel(PACKAGE, arguments.cache_dir.resolve() / "wheels")
        data = family(
            arguments.family, path, settings | {"seed": arguments.seed, "size": 1_000_000}
        )
        write_task(arguments.output_dir, data, arguments.train_size, arguments.heldout_size)
    except (Refused, NotFetched, OSError) as error:
        print(f"gym_task: {error}", file=sys.stderr)
        return 2
    print(
        f"task: {arguments.output_dir} ({arguments.family}; {arguments.train_size} problems to "
        f"train, {arguments.heldout_size} held out)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
