"""A generated task for the toy policy: multi-step arithmetic in GSM8K's file form.

Every problem is a chain of two to four small operands joined by ``+``, ``-`` and ``*``, worked from
left to right; the question shows the brackets that order needs. The solution is the chain of steps,
then the answer, so that a file line has exactly the keys and the form of GSM8K::

    {"question": "(3+4)*2-5=?", "answer": "3+4=7\\n7*2=14\\n14-5=9\\n#### 9"}

Train and held-out problems can never meet: a question belongs to one of the two splits by a hash of
its text, whatever the seed and the number of problems. A policy warm-started on the train split has
therefore seen no held-out question.

``--largest_value 9`` gives problems whose every value is one digit: about 110 facts instead of 940.

Left out on purpose: division and negative numbers (values within 0..50 keep the facts few enough to
be learnt in minutes), word problems (every token costs time on a CPU), right-nested brackets.

    python examples/python/toy_task.py --output_dir data/ --train_size 4096 --heldout_size 512
    python examples/python/toy_task.py --output_dir data/ --difficulty 2:0.5 3:0.5 --seed 7
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

LARGEST_VALUE = 50
FIRST_OPERANDS = range(1, 10)
OPERANDS = {"+": range(1, 10), "-": range(1, 10), "*": range(2, 10)}
HELDOUT_SHARE = 8  # one question in eight belongs to the held-out split
DEFAULT_DIFFICULTY: Mapping[int, float] = {2: 0.1, 3: 0.4, 4: 0.5}
MAX_MISSES_IN_A_ROW = 2000


@dataclass(frozen=True)
class Problem:
    """A chain of operations on a first operand, e.g. ``Problem(3, (("+", 4), ("*", 2)))`` for
    ``(3+4)*2``."""

    first: int
    operations: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The expression with the brackets that left-to-right order needs, then ``=?``."""
        text, ends_in_sum = str(self.first), False
        for operator, operand in self.operations:
            if operator == "*" and ends_in_sum:
                text = f"({text})"
            text += f"{operator}{operand}"
            ends_in_sum = operator != "*"
        return f"{text}=?"

    @property
    def solution(self) -> Solution:
        """The correct solution."""
        return self.solve()

    @property
    def split(self) -> Split:
        """The split this question belongs to, decided by its text alone."""
        digest = hashlib.sha256(self.question.encode()).digest()
        return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"

    def solve(self, write_result: Callable[[int], int] = lambda result: result) -> Solution:
        """Works the chain; ``write_result`` may change each result, and the next step goes on from
        what was written."""
        value, steps = self.first, []
        for operator, operand in self.operations:
            result = write_result(apply(operator, value, operand))
            steps.append(f"{value}{operator}{operand}={result}")
            value = result
        return Solution(tuple(steps), value)


@dataclass(frozen=True)
class Solution:
    """The steps of a solution and its answer."""

    steps: tuple[str, ...]
    answer: int

    @property
    def label(self) -> str:
        """GSM8K's answer text: the steps, one a line, then ``#### answer``."""
        return "\n".join([*self.steps, f"#### {self.answer}"])

    @property
    def completion(self) -> str:
        """What a policy writes after the question (without the end-of-text token)."""
        return f"<reasoning>{';'.join(self.steps)}</reasoning><answer>{self.answer}</answer>"


def apply(operator: str, left: int, right: int) -> int:
    """``left operator right`` for one of the three operators."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    raise ValueError(f"operator must be one of {sorted(OPERANDS)}, got {operator!r}")


def draw_problem(rng: random.Random, operands: int, largest_value: int = LARGEST_VALUE) -> Problem:
    """A problem with that many operands; every value on the way stays within
    0..``largest_value``."""
    value = first = rng.choice(FIRST_OPERANDS)
    operations = []
    for _ in range(operands - 1):
        operator, operand = _draw_operation(rng, value, largest_value)
        operations.append((operator, operand))
        value = apply(operator, value, operand)
    return Problem(first, tuple(operations))


def _draw_operation(rng: random.Random, value: int, largest_value: int) -> tuple[str, int]:
    allowed = {
        operator: [
            operand for operand in operands if 0 <= apply(operator, value, operand) <= largest_value
        ]
        for operator, operands in OPERANDS.items()
    }
    operator = rng.choice([operator for operator, operands in allowed.items() if operands])
    return operator, rng.choice(allowed[operator])


def problem_stream(
    seed: int,
    split: Split,
    difficulty: Mapping[int, float] = DEFAULT_DIFFICULTY,
    largest_value: int = LARGEST_VALUE,
) -> Iterator[Problem]:
    """Endless problems of one split, repeats included. ``difficulty`` maps a number of operands to
    its share.

    Raises ValueError if ``largest_value`` is below the largest first operand."""
    check_difficulty(difficulty)
    if largest_value < max(FIRST_OPERANDS):
        raise ValueError(
            f"largest_value must be at least {max(FIRST_OPERANDS)}, got {largest_value}"
        )
    rng = random.Random(f"{seed}/{split}")
    lengths, weights = list(difficulty), list(difficulty.values())
    while True:
        operands = rng.choices(lengths, weights)[0]
        while (problem := draw_problem(rng, operands, largest_value)).split != split:
            pass
        yield problem


def distinct_problems(stream: Iterable[Problem], count: int) -> list[Problem]:
    """The first ``count`` different problems of a stream.

    Raises:
        ValueError: the stream repeats itself so often that it holds hardly any more different
        problems.
    """
    found: dict[str, Problem] = {}
    misses = 0
    for problem in stream:
        if len(found) == count:
            break
        misses = misses + 1 if problem.question in found else 0
        if misses > MAX_MISSES_IN_A_ROW:
            raise ValueError(
                f"asked for {count} different problems, but after {len(found)} none of {misses} "
                "draws was new: ask for fewer, or give problems with more operands a larger "
                "share (--difficulty)"
            )
        found.setdefault(problem.question, problem)
    return list(found.values())


def check_difficulty(difficulty: Mapping[int, float]) -> None:
    """Raises ValueError unless the mapping is {2..4 operands: share >= 0}, with at least one
    positive share."""
    if unknown := sorted(difficulty.keys() - {2, 3, 4}):
        raise ValueError(f"difficulty: problems have 2, 3 or 4 operands, got {unknown}")
    if any(share < 0 for share in difficulty.values()) or sum(difficulty.values()) <= 0:
        raise ValueError(f"difficulty: shares must be >= 0 and not all 0, got {dict(difficulty)}")


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """One JSON object a line, keys ``question`` and ``answer`` as in GSM8K."""
    lines = (json.dumps({"question": p.question, "answer": p.solution.label}) for p in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_task(
    output_dir: Path,
    *,
    train_size: int = 4096,
    heldout_size: int = 512,
    seed: int = 42,
    difficulty: Mapping[int, float] = DEFAULT_DIFFICULTY,
    largest_value: int = LARGEST_VALUE,
) -> dict[Split, Path]:
    """Writes ``train.jsonl`` and ``heldout.jsonl``: no question twice, none in both. Returns the
    two paths.

    Repeats are skipped: a length with few different problems may end below its share.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    sizes: dict[Split, int] = {"train": train_size, "heldout": heldout_size}
    paths: dict[Split, Path] = {}
    for split, size in sizes.items():
        paths[split] = output_dir / f"{split}.jsonl"
        stream = problem_stream(seed, split, difficulty, largest_value)
        write_problems(paths[split], distinct_problems(stream, size))
    return paths


def parse_difficulty(shares: Iterable[str]) -> dict[int, float]:
    """``["2:0.1", "3:0.9"]`` -> ``{2: 0.1, 3: 0.9}``."""
    try:
        difficulty = {
            int(operands): float(share) for operands, share in (item.split(":") for item in shares)
        }
    except ValueError as error:
        raise ValueError(
            f"difficulty: expected OPERANDS:SHARE items such as 3:0.4, got {list(shares)}"
        ) from error
    check_difficulty(difficulty)
    return difficulty


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl"
    )
    parser.add_argument("--train_size", type=int, default=4096, help="problems in train.jsonl")
    parser.add_argument("--heldout_size", type=int, default=512, help="problems in heldout.jsonl")
    parser.add_argument("--seed", type=int, default=42, help="same seed, same files")
    parser.add_argument(
        "--difficulty",
        nargs="+",
        metavar="OPERANDS:SHARE",
        default=[f"{operands}:{share}" for operands, share in DEFAULT_DIFFICULTY.items()],
        help="mix of problem lengths, e.g. 2:0.1 3:0.4 4:0.5",
    )
    parser.add_argument(
        "--largest_value",
        type=int,
        default=LARGEST_VALUE,
        help="of every value on the way, 9 or more",
    )
    args = parser.parse_args()
    paths = write_task(
        args.output_dir,
        train_size=args.train_size,
        heldout_size=args.heldout_size,
        seed=args.seed,
        difficulty=parse_difficulty(args.difficulty),
        largest_value=args.largest_value,
    )
    for split, path in paths.items():
        print(f"{split}: {path}")


if __name__ == "__main__":
    main()
