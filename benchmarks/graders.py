"""The benchmarks' grader against published solutions, rewritten answers, other problems' answers,
and attacks.

    python benchmarks/graders.py DATA --output benchmarks/results/graders_cpu.json

DATA holds gsm8k/test.jsonl and math/test.jsonl as published. Everything goes through the loaders
and the killable pool that ``python -m openrlhf_ext.cli.evaluate`` uses. The JSON lists what was
graded against expectation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.answers import normalized
from openrlhf_ext.rewards.grading import RewardError
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.tools.evaluate.problems import MATHS, load_benchmark

ROOT = Path(__file__).parent.parent
FILES = {"gsm8k": "gsm8k/test.jsonl", "math": "math/test.jsonl"}
SOLUTION = {"gsm8k": "answer", "math": "solution"}
OTHERS = 1
AHEAD = 64
DEADLINE_S = 30.0
INTEGER = re.compile(r"-?\d+")
FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")


@dataclass
class Case:
    """A completion for a label; ``name`` says what was done to it."""

    name: str
    label: str
    completion: str


@dataclass
class Verdict:
    """A score, or what came instead of one; ``seconds`` of grading."""

    case: Case
    score: float | None
    seconds: float
    error: str = ""


def rewritings(answer: str) -> Iterator[tuple[str, str]]:
    """Other ways to write an answer, with a name each; only those that apply to it."""
    if "\\frac" in answer:
        yield "dfrac", answer.replace("\\frac", "\\dfrac")
        yield "tfrac", answer.replace("\\frac", "\\tfrac")
    spaced = (
        re.sub(r"(?<=[\w})])\s*([+=-])\s*(?=[\w\\({])", r" \1 ", answer)
        if "text" not in answer
        else answer
    )
    yield (
        "spaces",
        f" {spaced.replace(',', ', ')} " if not re.search(r"\d,\d{3}\b", answer) else f" {spaced} ",
    )
    yield "thin spaces", f"\\, {answer}\\!"
    yield "dollars around", f"${answer}$"
    yield "full stop", f"{answer}."
    if "\\left" not in answer and re.fullmatch(r"[(\[].*[)\]]", answer):
        yield "left right", "\\left" + answer[:-1] + "\\right" + answer[-1]
    if "\\left" in answer:
        yield "no left right", answer.replace("\\left", "").replace("\\right", "")
    if INTEGER.fullmatch(answer):
        yield "decimal", f"{answer}.0"
        yield "two decimals", f"{answer}.00"
        yield "unit as text", f"{answer}\\text{{ cm}}"
        yield "unit", f"{answer} \\mathrm{{cm}}^2"
        yield "unit word", f"{answer} dollars"
        yield "dollar sign", f"\\${answer}"
        yield "degrees", f"{answer}^\\circ"
        yield "equation", f"x = {answer}"
        yield "text", f"\\text{{{answer}}}"
        if abs(int(answer)) >= 1000:
            yield "thousands", f"{int(answer):,}"
            yield "LaTeX thousands", f"{int(answer):,}".replace(",", "{,}")
    if found := FRACTION.fullmatch(answer):
        sign, top, bottom = found.groups()
        yield "slash", f"{sign}{top}/{bottom}"
        if len(top) == len(bottom) == 1:
            yield "short frac", f"{sign}\\frac{top}{bottom}"
        if (10**6 * int(top)) % int(bottom) == 0:
            yield "as decimal", f"{sign}{int(top) / int(bottom):.10f}".rstrip("0")


def attacks(count: int, seed: int = 0) -> Iterator[Case]:
    """Completions that try to hang, crash or fool the grader; none of them is right."""
    draw = random.Random(seed)
    kinds: dict[str, Callable[[int], str]] = {
        "nested braces": lambda n: "{" * n + "1" + "}" * n,
        "nested fractions": lambda n: "\\frac{1}{" * n + "2" + "}" * n,
        "nested roots": lambda n: "\\sqrt{" * n + "2" + "}" * n,
        "nested brackets": lambda n: "(" * n + "1" + ")" * n,
        "unclosed": lambda n: "\\frac{" * n,
        "power tower": lambda n: "9^{" * min(n, 60) + "9" + "}" * min(n, 60),
        "huge exponent": lambda n: f"10^{{{'9' * min(n, 200)}}}",
        "huge factorial": lambda n: f"{'9' * min(n, 12)}!",
        "exponent notation": lambda n: f"1e{'9' * min(n, 250)}",
        "long number": lambda n: "9" * n,
        "long sum": lambda n: "+".join(["x"] * min(n, 140)),
        "huge power of a sum": lambda n: f"(x+y+z+1)^{{{draw.randint(50, 99999)}}}",
        "regex bait": lambda n: "a" * n + "!",
        "comma bait": lambda n: "1," * n,
        "space bait": lambda n: "1" + " " * n + "x",
        "hash bait": lambda n: "#" * n + " \n",
        "tag bait": lambda n: "<answer>" * n,
        "boxed bait": lambda n: "\\boxed{" * n,
        "nulls": lambda n: "\0" * n,
        "control characters": lambda n: "".join(
            chr(draw.randrange(32)) for _ in range(min(n, 2000))
        ),
        "lone surrogates": lambda n: "\ud800\udfff"[:: draw.choice((1, -1))] * n,
        "any characters": lambda n: "".join(
            chr(draw.randrange(0x110000)) for _ in range(min(n, 2000))
        ),
        "LaTeX bomb": lambda n: "\\def\\a{\\a\\a}" * min(n, 20) + "\\a",
        "LaTeX loops": lambda n: f"\\sum_{{k=1}}^{{{'9' * min(n, 20)}}} k^k",
        "big product": lambda n: f"\\prod_{{k=1}}^{{{'9' * min(n, 9)}}} k",
        "integral": lambda n: "\\int_0^1 " * min(n, 15) + "e^{-x^2} dx" * min(n, 15),
        "big binomial": lambda n: f"\\binom{{{'9' * min(n, 12)}}}{{{'4' * min(n, 12)}}}",
        "big matrix": lambda n: "\\begin{pmatrix}" + "1&" * min(n, 100) + "1\\end{pmatrix}",
        "big set": lambda n: "\\{" + ",".join(map(str, range(min(n, 80)))) + "\\}",
        "equation chain": lambda n: "=".join(["x"] * min(n, 140)),
        "python": lambda n: "__import__('os').system('true')",
        "format string": lambda n: "{0.__class__}%s%n" * min(n, 40),
        "digits of other scripts": lambda n: "\u0663\u06f3\u0969" * min(n, 90),
        "infinity": lambda n: draw.choice(
            ["\\infty", "nan", "inf", "-\\infty", "1/0", "\\frac{1}{0}", "0^{-1}"]
        ),
    }
    labels = [
        "3.5",
        "\\frac{14}{3}",
        "x^2+1",
        "\\left( 3, \\frac{\\pi}{2} \\right)",
        "\\text{Evelyn}",
        "(-\\infty, 2)",
    ]
    names = list(kinds)
    for number in range(count):
        name = names[number % len(names)]
        size = 10**6 if number % 500 < 7 else draw.choice((3, 10, 30, 100, 290, 1000, 5000))
        answer = kinds[name](size)[: 10**6]
        wrapped = draw.choice(
            (f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"#### {answer}")
        )
        yield Case(name, draw.choice(labels), wrapped)


def run(pool: RewardPool, cases: Iterator[Case]) -> Iterator[Verdict]:
    """Grade cases, a bounded number ahead."""
    waiting: list[tuple[Case, Future]] = []
    for case in cases:
        waiting.append((case, pool.submit(case.completion, "", case.label)))
        if len(waiting) >= AHEAD:
            yield _verdict(*waiting.pop(0))
    for each in waiting:
        yield _verdict(*each)


def _verdict(case: Case, future: Future) -> Verdict:
    try:
        result = future.result(timeout=20 * DEADLINE_S)
        return Verdict(case, result.score, result.seconds)
    except RewardError as error:
        return Verdict(
            case, None, DEADLINE_S, f"{type(error).__name__}: {error.message.splitlines()[0]}"
        )


def count(results: Iterator[Verdict], expected: float) -> dict:
    """How many of each name have the expected score, and those that do not."""
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    exceptions = []
    for verdict in results:
        case = verdict.case
        total[case.name] += 1
        slowest[case.name] = max(slowest.get(case.name, 0.0), verdict.seconds)
        if verdict.score == expected:
            right[case.name] += 1
        else:
            exceptions.append(
                {
                    "name": case.name,
                    "label": case.label,
                    "completion": case.completion[-200:],
                    "score": verdict.score,
                    "error": verdict.error,
                }
            )
    return {
        "cases": total.total(),
        "as_expected": right.total(),
        "share": right.total() / max(1, total.total()),
        "verdicts": total.total() - sum(each["score"] is None for each in exceptions),
        "slowest_s": round(max(slowest.values()), 2),
        "by_name": {
            name: {
                "as_expected": right[name],
                "cases": total[name],
                "slowest_s": round(slowest[name], 2),
            }
            for name in total
        },
        "exceptions": exceptions,
    }


def solutions(name: str, path: Path, labels: list[str]) -> Iterator[Case]:
    """The published solutions as completions."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row, label in zip(rows, labels, strict=True):
        yield Case(name, label, row[SOLUTION[name]])


def rewritten(name: str, labels: list[str]) -> Iterator[Case]:
    """Every answer in every other way to write it."""
    for label in labels:
        for how, answer in rewritings(label):
            yield Case(f"{name}: {how}", label, f"The answer is \\boxed{{{answer}}}.")


def other_answers(name: str, labels: list[str], seed: int = 1) -> Iterator[Case]:
    """Every problem with the answers of some others, those of the same normalized text left out."""
    draw = random.Random(seed)
    for label in labels:
        others = [
            other for other in draw.sample(labels, OTHERS) if normalized(other) != normalized(label)
        ]
        for other in others:
            yield Case(name, label, f"\\boxed{{{other}}}")


def about(arguments: argparse.Namespace) -> dict:
    """What a number needs to be repeated."""
    return {
        "command": " ".join(["python", "benchmarks/graders.py", "DATA", *sys.argv[2:]]),
        **record.environment("math-verify", "sympy"),
        "workers": arguments.workers,
        "deadline_s": DEADLINE_S,
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, help="problems of each file")
    parser.add_argument("--attacks", type=int, default=10_000)
    arguments = parser.parse_args()
    started, header = time.monotonic(), about(arguments)  # before --output makes the tree dirty
    parts: dict[str, dict] = {}

    def measure(part: str, cases: Iterator[Case], expected: float) -> None:
        parts[part] = count(run(pool, cases), expected)
        seconds = round(time.monotonic() - started)
        print(
            part,
            {k: v for k, v in parts[part].items() if k not in ("exceptions", "by_name")},
            f"{seconds} s",
            flush=True,
        )
        if arguments.output:  # after every part: the last one takes longest
            report = {**header, "seconds": seconds, **parts}
            record.write(arguments.output, report)

    with RewardPool(
        Reward(remote_url=str(MATHS), num_workers=arguments.workers, timeout_s=DEADLINE_S)
    ) as pool:
        pool.check()
        for name, file in FILES.items():
            path = arguments.data / file
            labels = [problem.label for problem in load_benchmark(name, path)]
            some = labels[: arguments.limit]
            measure(f"{name} solutions", solutions(name, path, labels), 1.0)
            measure(f"{name} rewritten", rewritten(name, some), 1.0)
            measure(f"{name} other answers", other_answers(name, some), 0.0)
        measure("attacks", attacks(arguments.attacks), 0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
