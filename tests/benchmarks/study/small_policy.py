"""A study's maker in a few seconds: a policy of two layers that has learned its problems, half of
the answers wrong.

It stands in for examples/python/toy_policy.py, whose warm start (tests/examples) takes a minute for
each seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "python"))

import torch
import toy_policy
import toy_task

PROBLEMS, STEPS = 32, 120


def completions(problem: toy_task.Problem, choose: random.Random) -> list[str]:
    """With steps and without, right and wrong: groups of all of their samples equal are rare."""
    wrong = toy_policy.careless_solution(problem, choose, slip_rate=1.0, slips=(-10, -1, 1, 10))
    return [
        write(solution) + toy_policy.EOS
        for solution in (problem.solution, wrong)
        for write in (toy_policy.direct_answer, lambda solution: solution.completion)
    ]


def train(
    model: torch.nn.Module, rows: list[tuple[list[int], list[int]]], choose: random.Random
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(STEPS):
        batch = choose.sample(rows, 24)
        longest = max(len(asked) + len(answer) for asked, answer in batch)
        ids, labels = (
            torch.zeros(len(batch), longest, dtype=torch.long),
            torch.full((len(batch), longest), -100),
        )
        for row, (asked, answer) in enumerate(batch):
            end = len(asked) + len(answer)
            ids[row, :end] = torch.tensor(asked + answer)
            labels[row, len(asked) : end] = torch.tensor(answer)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--data_dir", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1}
    tokenizer = toy_policy.build_tokenizer()
    model = toy_policy.build_model(toy_policy.PolicySettings(seed=given.seed, **sizes), tokenizer)
    choose = random.Random(given.seed)
    problems = toy_task.distinct_problems(toy_task.problem_stream(given.seed, "train"), PROBLEMS)
    rows = [
        (tokenizer(problem.question)["input_ids"], tokenizer(text)["input_ids"])
        for problem in problems
        for text in completions(problem, choose)
    ]
    train(model, rows, choose)
    model.save_pretrained(given.output_dir)
    tokenizer.save_pretrained(given.output_dir)
    toy_task.write_task(given.data_dir, train_size=PROBLEMS, heldout_size=16, seed=given.seed)


if __name__ == "__main__":
    main()
