"""Turns published mathematics data sets into prompt files for training and evaluation.

    python examples/python/prepare_data.py dapo17k BytedTsinghua-SIA/DAPO-Math-17k --output
    data/dapo17k.jsonl \\
        --against aime24=aime24/test.jsonl aime25=aime25/test.jsonl
    python examples/python/prepare_data.py gsm8k gsm8k/train.jsonl --output data/gsm8k.jsonl
    --system_prompt conflict python examples/python/prepare_data.py math math/train.jsonl --output
    data/math.jsonl --template dapo

The source is a file as it was published (.jsonl, .json, .parquet, .arrow), a folder of such files,
or a hub name with --subset and --split; several are read one after the other. Every record is read
or the command stops, naming file and record. Questions that occur again are left out, those that
come with two different answers altogether; so are questions of the files named by --against, which
are for testing.

One JSON object per line comes out: ``question`` (a text, or with a system prompt a list of chat
messages, for --data.apply_chat_template), ``answer`` (the bare final answer) and ``source``; with
--solutions also ``solution``, the worked one that the data set has, for supervised fine-tuning
(with a system prompt a list of one message). Beside it FILE.manifest.json has the SHA-256 of every
file read and written and the counts. Exit status 0, or 2 if something given is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf_ext.inputs import InputError
from openrlhf_ext.outputs import in_one_piece
from openrlhf_ext.tools.evaluate.problems import BENCHMARKS, NotThisFormat, system_message
from openrlhf_ext.tools.evaluate.protocols import DAPO_TEMPLATE, MATH_TEMPLATE, SYSTEM_PROMPTS

TEMPLATES = {"dapo": DAPO_TEMPLATE, "boxed": MATH_TEMPLATE}
SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


class Refused(ValueError):
    """Something given is wrong; the message says what and where."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = parser().parse_args(argv)
    try:
        manifest = prepare(arguments)
    except (Refused, InputError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    for what, count in manifest["counts"].items():
        print(f"{count:9,d}  {what}")
    print(f"{arguments.output}  sha256 {manifest['output']['sha256']}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", choices=sorted(READERS), help="data set, whose published format the records have")
    add("sources", nargs="+", metavar="SOURCE", help="file, folder or hub name")
    add("--output", required=True, help="JSONL file to write")
    add("--subset", help="subset of a hub data set, such as gsm8k's main")
    add("--split", default="train", help="split of a hub data set")
    add("--system_prompt", help=f"chat's system message: {', '.join(SYSTEM_PROMPTS)}, or a text")
    add(
        "--template",
        help=f"text around the question: {', '.join(TEMPLATES)}, or a text with {{}}; dapo17k has "
        "its own",
    )
    add(
        "--against",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="test files whose questions are left out",
    )
    add("--solutions", action="store_true", help=f"worked solutions too, of {', '.join(SOLUTIONS)}")
    add("--limit", type=int, help="records written, from the start")
    return parser


def prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Reads, checks and writes; returns the manifest."""
    template = _template(arguments.name, arguments.template)
    system = system_message(arguments.system_prompt)
    held_out, test_files = _held_out(arguments.against)
    problems, contradicting, files = _distinct(arguments)
    kept = {key: problem for key, problem in problems.items() if key not in held_out}
    records = [
        {"question": _question(template.format(problem.text), system), "answer": problem.answer}
        | (
            {}
            if problem.solution is None
            else {"solution": _solution(problem, arguments.system_prompt)}
        )
        | {"source": arguments.name}
        for problem in list(kept.values())[: arguments.limit]
    ]
    if not records:
        raise Refused("no record is left to write")
    output = Path(arguments.output)
    _write(output, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    read = sum(file["records"] for file in files)
    manifest = {
        "data_set": arguments.name,
        "system_prompt": system,
        "template": template,
        "sources": files,
        "against": test_files,
        "output": {"path": str(output), "sha256": _sha256(output)},
        "counts": {
            "records read": read,
            "left out: the question occurs again": read - len(problems) - contradicting,
            "left out: the same question with different answers": contradicting,
            "left out: questions of the test files": len(problems) - len(kept),
            "records written": len(records),
        },
    }
    _write(
        output.with_name(output.name + ".manifest.json"),
        json.dumps(manifest, indent=2, ensure_ascii=False) + "\n",
    )
    return manifest


class Problem(NamedTuple):
    """A question, its bare answer, and the worked solution where it is asked for."""

    text: str
    answer: str
    solution: str | None


def _distinct(
    arguments: argparse.Namespace,
) -> tuple[dict[str, Problem], int, list[dict[str, Any]]]:
    """The problems by what makes their questions equal, the records that contradict others, what
    was read."""
    worked = _solutions(arguments)
    problems: dict[str, Problem] = {}
    answers: dict[str, set[str]] = {}
    times: dict[str, int] = {}
    files = []
    for source in arguments.sources:
        records = 0
        for place, row in rows(source, arguments.subset, arguments.split):
            text, answer = _read(READERS[arguments.name], place, row)
            key = same_question(text)
            problems.setdefault(key, Problem(text, answer, None if worked is None else worked(row)))
            answers.setdefault(key, set()).add(answer)
            times[key] = times.get(key, 0) + 1
            records += 1
        files.append({"source": source, "records": records, "sha256": _checksums(source)})
    contradicting = {key for key, given in answers.items() if len(given) > 1}
    distinct = {key: problem for key, problem in problems.items() if key not in contradicting}
    return distinct, sum(times[key] for key in contradicting), files


def _solutions(arguments: argparse.Namespace) -> Callable[[Mapping[str, Any]], str] | None:
    """Where a record that could be read has its worked solution; None: they are not asked for."""
    if not arguments.solutions:
        return None
    if arguments.name not in SOLUTIONS:
        raise Refused(
            f"--solutions: {arguments.name} has no worked solutions, {' and '.join(SOLUTIONS)} have"
        )
    return SOLUTIONS[arguments.name]


def _solution(problem: Problem, system_prompt: str | None) -> str | list[dict[str, str]]:
    """In the form that the system prompt asks for."""
    text = str(problem.solution)
    if system_prompt == "conflict":
        text = f"<reasoning>{text}</reasoning>\n<answer>{problem.answer}</answer>"
    return text if system_prompt is None else [{"role": "assistant", "content": text}]


def _held_out(against: Sequence[str]) -> tuple[set[str], list[dict[str, Any]]]:
    """What the questions of the test files are known by."""
    keys: set[str] = set()
    files = []
    for given in against:
        name, separator, path = given.partition("=")
        if not separator or name not in READERS:
            raise Refused(
                f"--against takes NAME=FILE with a NAME of {', '.join(sorted(READERS))}: got "
                f"{given}"
            )
        found = {
            same_question(_read(READERS[name], place, row)[0])
            for place, row in rows(path, None, "test")
        }
        keys |= found
        files.append({"source": path, "questions": len(found), "sha256": _checksums(path)})
    return keys, files


def _read(
    reader: Callable[[Mapping[str, Any]], tuple[str, str]], place: str, row: Any
) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        raise Refused(f"{place}: must be a JSON object, got {type(row).__name__}")
    try:
        return reader(row)
    except NotThisFormat as error:
        raise Refused(f"{place}: {error}") from error


def same_question(text: str) -> str:
    """Equal for questions that differ in spacing, case or the form of their characters only."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _question(text: str, system: str | None) -> str | list[dict[str, str]]:
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _template(name: str, given: str | None) -> str:
    if name == "dapo17k" and given is not None:
        raise Refused(
            "--template: the prompts of dapo17k have their instructions already, leave it out"
        )
    template = TEMPLATES.get(given or "{}", given or "{}")
    try:
        used = template.format("\0question")
    except (IndexError, KeyError, ValueError):
        used = ""
    if "\0question" not in used:
        raise Refused(
            "--template must hold one {} for the question (write other braces twice): got "
            f"{given!r}"
        )
    return template


# --- reading
# --------------------------------------------------------------------------------------------------


def _dapo17k(row: Mapping[str, Any]) -> tuple[str, str]:
    """As BytedTsinghua-SIA/DAPO-Math-17k has it: a chat of one message, and the answer under
    reward_model."""
    try:
        (message,) = row["prompt"]
        text, answer = message["content"], row["reward_model"]["ground_truth"]
    except (KeyError, TypeError, ValueError) as error:
        raise NotThisFormat(
            "must have one message under 'prompt' and reward_model.ground_truth "
            f"({type(error).__name__}: {error}), has {sorted(row)}"
        ) from error
    if (
        not isinstance(text, str)
        or not text.strip()
        or not isinstance(answer, str)
        or not answer.strip()
    ):
        raise NotThisFormat(f"prompt and answer must be texts, got {text!r:.80} and {answer!r:.80}")
    return text, answer.strip()


SOLUTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "gsm8k": lambda row: str(row["answer"].rpartition("####")[0].strip()),
    "math": lambda row: str(row["solution"].strip()),
}
READERS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "dapo17k": _dapo17k,
    **BENCHMARKS,
}


def rows(source: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """Every record with the place where it stands.

    Raises:
        Refused: there is no such file or data set, or a line is not JSON.
    """
    path = Path(source)
    if path.exists():
        for file in _files(path):
            if file.suffix == ".jsonl":
                yield from _lines(file)
            else:
                yield from _table(
                    str(file), SUFFIXES[file.suffix], data_files=str(file), split="train"
                )
    elif path.suffix in SUFFIXES or source.startswith((".", "/")):
        raise Refused(f"there is no file {source}")
    else:
        yield from _table(source, source, name=subset, split=split)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except ValueError as error:
            raise Refused(f"{path}, line {number}: not JSON ({error})") from error


def _table(shown: str, *which: str, **options: Any) -> Iterator[tuple[str, Any]]:
    import datasets  # takes seconds

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(*which, **options)
    # a library of many kinds of errors; all mean that the source cannot be read
    except Exception as error:
        raise Refused(f"{shown} cannot be read: {type(error).__name__}: {error}") from error
    for number, row in enumerate(table, start=1):
        yield f"{shown}, record {number}", row


def _files(path: Path) -> list[Path]:
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    )
    if not files or files[0].suffix not in SUFFIXES:
        raise Refused(f"{path} is no file of {', '.join(SUFFIXES)} and no folder with such files")
    return files


# --- writing
# --------------------------------------------------------------------------------------------------


def _checksums(source: str) -> dict[str, str] | None:
    """SHA-256 of each local file; None of a hub data set."""
    path = Path(source)
    return {str(file): _sha256(file) for file in _files(path)} if path.exists() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with in_one_piece(path) as partial:
        partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
