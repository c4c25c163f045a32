"""One run of a study: training in one process, with plain transformers and this package's
algorithms.

It makes the optimizer steps that ``train_ppo_ray`` makes of the same rollouts (batches sorted by
prompt, random mini-batches of whole groups, old log-probs by the policy itself, Adam), without Ray,
Megatron and vLLM: several runs fit on a laptop.

Shape suffixes: B = completions, N = completion tokens of all of them, L = longest sequence, D =
hidden size.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.study.decoding import Sampled, decode
from benchmarks.study.outcomes import SHAPED
from benchmarks.study.settings import Evaluation, resolve
from openrlhf_ext.algorithms import (
    Algorithm,
    LossBatch,
    RolloutBatch,
    get_algorithm,
    mean_entropies,
)
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.estimator import algorithm_options, initial_entropy_prompts
from openrlhf_ext.megatron.step.dealing import group_chunks, mini_batch_order
from openrlhf_ext.megatron.step.optimizer import warmup_steps
from openrlhf_ext.rewards.counting import pass_at_k
from openrlhf_ext.rewards.grading import parse_answer
from openrlhf_ext.rewards.worker import call_reward, load_reward_function
from openrlhf_ext.rollout.response import derived_seed
from openrlhf_ext.tools.evaluate.problems import Problem, load_problems

_SEEDS_PER_ROLLOUT = 1 << 20  # as ranks/policy.py
_EVALUATED_TOGETHER = 512  # completions
_EVALUATIONS, _GREEDY, _TRAINING = range(3)  # who draws: the first number of a seed


@dataclass(frozen=True)
class Rollout:
    """Graded completions, those of a prompt next to each other.

    Attributes:
        prompts: (B,) token ids.
        sampled: their tokens, entropies and so on.
        rewards: (B,) float64.
        scores: (B,) 1 = correct.
        logs: the reward function's ``extra_logs``, (B,) each.
    """

    prompts: list[list[int]]
    sampled: Sampled
    rewards: Tensor
    scores: Tensor
    logs: dict[str, Tensor]


class StudyRun:
    """One run of one method.

    Args:
        config: the options; what it does not read was refused before (``settings``).
        policy: folder of the checkpoint to start from.
        train, heldout: files of problems.
        steps: rollouts, each trained on at once.
        evaluation: how held-out problems are sampled.
        short_tokens: a completion of at most so many tokens is short.
        device: where the model is.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: str,
        train: str,
        heldout: str,
        steps: int,
        evaluation: Evaluation,
        short_tokens: int,
        device: str = "cpu",
    ) -> None:
        self.config, self.steps, self.evaluation, self.short_tokens = (
            config,
            steps,
            evaluation,
            short_tokens,
        )
        self.device = torch.device(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(policy)
        self.model: Any = (
            AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).to(self.device).eval()
        )
        # transformers keeps the padding token's row from learning, Megatron does not, and some
        # policies sample it
        self.model.get_input_embeddings().padding_idx = None
        self.reference = copy.deepcopy(self.model) if config.has_reference else None
        self.train_problems = self._shuffled(self._problems(train))
        self.held_out = self._problems(heldout)
        self.reward = load_reward_function(config.reward.remote_url or "")
        self.algorithm = self._build_algorithm()
        self.optimizer = _adam(self.model, config)
        self.updates = 0

    def run(self) -> dict[str, Any]:
        """Trains. Returns ``steps`` (each name's values, one a step) and ``evaluations`` (a list,
        that before the first step included)."""
        steps: dict[str, list[float | None]] = {}
        evaluations = [self._evaluate(0)]
        for step in range(1, self.steps + 1):
            for name, value in self.step(step).items():
                steps.setdefault(name, []).append(_rounded(value))
            if step % self.evaluation.every == 0 or step == self.steps:
                evaluations.append(self._evaluate(step))
        return {"steps": steps, "evaluations": evaluations}

    def step(self, step: int) -> dict[str, float]:
        """Samples, shapes and trains on one rollout; what it was like."""
        started = time.perf_counter()
        rollout = self.rollout(step)
        sampled = time.perf_counter()
        batch = self.batch(rollout)
        scored = time.perf_counter()
        shaped = self.algorithm.shape(batch)
        shaping = time.perf_counter() - scored
        trained = self.train(rollout, shaped, step)
        ended = time.perf_counter()
        described = self._describe(rollout)
        described |= {
            name: float(shaped.metrics[name]) for name in SHAPED if name in shaped.metrics
        }
        seconds = {"sampling_s": sampled - started, "shaping_s": shaping, "step_s": ended - started}
        return described | trained | seconds

    # ---- rollouts
    # ----------------------------------------------------------------------------------------------

    def rollout(self, step: int) -> Rollout:
        """The completions of a step, by the policy as it is now."""
        size = self.config.rollout.batch_size
        start = (step - 1) * size % len(self.train_problems)
        problems = sorted(
            (self.train_problems * 2)[start : start + size], key=lambda problem: problem.prompt
        )
        per_step = max(1, self.config.train.batch_size // self.config.rollout.n_samples_per_prompt)
        order = mini_batch_order(len(problems), per_step, self.config.train.seed, step - 1)
        return self._rollout(
            [problems[i] for i in order], derived_seed(self._seed(_TRAINING), step)
        )

    def _rollout(
        self,
        problems: Sequence[Problem],
        seed: int,
        samples: int | None = None,
        greedy: bool = False,
    ) -> Rollout:
        options = self.config.rollout
        samples = samples or options.n_samples_per_prompt
        unique = self.tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
        sampled = decode(
            self.model,
            unique,
            samples=samples,
            max_new_tokens=options.max_new_tokens or 0,
            temperature=0.0 if greedy else options.temperature,
            seed=seed,
            eos=self.tokenizer.eos_token_id,
        )
        repeated = [problem for problem in problems for _ in range(samples)]
        ends = [None if truncated else -1 for truncated in sampled.truncated_B.tolist()]
        bodies = [row[:end] for row, end in zip(sampled.rows, ends, strict=True)]
        texts = zip(*map(self.tokenizer.batch_decode, (sampled.rows, bodies)), strict=True)
        grades = [
            parse_answer(call_reward(self.reward, p.prompt + text, p.prompt, p.label, body))
            for p, (text, body) in zip(repeated, texts, strict=True)
        ]
        return Rollout(
            prompts=[ids for ids in unique for _ in range(samples)],
            sampled=sampled,
            rewards=torch.tensor([grade.reward for grade in grades], dtype=torch.float64),
            scores=torch.tensor([grade.score for grade in grades], dtype=torch.float64),
            logs={
                name: torch.tensor([g.extra_logs[name] for g in grades])
                for name in grades[0].extra_logs
            },
        )

    def batch(self, rollout: Rollout) -> RolloutBatch:
        """What the algorithm gets: log-probs and entropies of the policy as it is now."""
        rows, group = rollout.sampled.rows, self.config.rollout.n_samples_per_prompt
        with torch.no_grad():
            scores = [
                self._score(self.model, rollout.prompts[part], rows[part])
                for part in self._forward_parts(rows)
            ]
            logprobs_N, entropies_N = (torch.cat(values) for values in zip(*scores, strict=True))
            reference_N = None
            if self.reference is not None:
                parts = self._forward_parts(rows)
                reference_N = torch.cat(
                    [
                        self._score(self.reference, rollout.prompts[part], rows[part])[0]
                        for part in parts
                    ]
                )
        return RolloutBatch(
            tokens=torch.tensor([token for row in rows for token in row], device=self.device),
            lengths=torch.tensor([len(row) for row in rows], device=self.device),
            rewards=rollout.rewards.to(self.device),
            group_ids=torch.arange(len(rows), device=self.device) // group,
            old_logprobs=logprobs_N,
            entropies=entropies_N,
            ref_logprobs=reference_N,
            truncated=rollout.sampled.truncated_B.to(self.device),
            group_size=group,
        )

    def _forward_parts(self, rows: Sequence[Any]) -> list[slice]:
        size = self.config.rollout.micro_batch_size
        return [slice(start, start + size) for start in range(0, len(rows), size)]

    def _score(
        self, model: Any, prompts: Sequence[list[int]], rows: Sequence[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """(N,) log-probs and entropies of the completion tokens, the former differentiable."""
        logits_NV = (
            _completion_logits(model, prompts, rows, self.device) / self.config.rollout.temperature
        )
        logprobs_NV = logits_NV.log_softmax(-1)
        tokens_N = torch.tensor([token for row in rows for token in row], device=self.device)
        entropies_N = -(logprobs_NV.detach().exp() * logprobs_NV.detach()).sum(-1)
        return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], entropies_N

    # ---- training
    # ----------------------------------------------------------------------------------------------

    def train(self, rollout: Rollout, shaped: LossBatch, step: int) -> dict[str, float]:
        """The optimizer steps on one rollout; means over them."""
        train, group = self.config.train, self.config.rollout.n_samples_per_prompt
        chunks = list(group_chunks(len(shaped), group, train.batch_size))
        updates = [
            self._update(rollout, shaped, chunk, step, number)
            for number, chunk in enumerate(chunks * train.max_epochs)
        ]
        names = ("grad_norm", "clip_fraction", *(("ref_kl",) if self.reference is not None else ()))
        return {name: fmean(update.get(name, 0.0) for update in updates) for name in names}

    def _update(
        self, rollout: Rollout, shaped: LossBatch, chunk: slice, step: int, number: int
    ) -> dict[str, float]:
        """One optimizer step on some rows; ``number`` counts those since the rollout."""
        found = self.gradient(rollout, shaped, chunk, step, number)
        self.updates += 1
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self._learning_rate(self.updates)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.actor.max_norm or math.inf
        )
        self.optimizer.step()
        return found | {"grad_norm": float(norm)}

    def gradient(
        self, rollout: Rollout, shaped: LossBatch, chunk: slice, step: int, number: int = 0
    ) -> dict[str, float]:
        """Leaves the gradient of an optimizer step in the parameters; the loss's metrics."""
        mini = self._prepared(rollout, shaped.mini_batch(chunk), chunk, step, number)
        prompts, rows = rollout.prompts[chunk], rollout.sampled.rows[chunk]
        self.optimizer.zero_grad()
        found: dict[str, float] = {}
        for part in _by_length(prompts, rows, self.config.train.micro_batch_size):
            new_N, _ = self._score(self.model, [prompts[i] for i in part], [rows[i] for i in part])
            loss = mini.algorithm.loss(new_N, mini.select(part))
            loss.value.backward()
            for name, value in loss.metrics.items():
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _prepared(
        self, rollout: Rollout, mini: LossBatch, chunk: slice, step: int, number: int
    ) -> LossBatch:
        """With its tokens chosen, where the algorithm chooses by the current policy (as
        ranks/policy.py)."""
        if not mini.algorithm.needs_prepare:
            return mini
        if number == 0:
            return mini.algorithm.prepare(mini["old_logprobs"], mini, seed=step)
        prompts, rows = rollout.prompts[chunk], rollout.sampled.rows[chunk]
        with torch.no_grad():
            new_N = torch.cat(
                [
                    self._score(self.model, prompts[part], rows[part])[0]
                    for part in self._forward_parts(rows)
                ]
            )
        return mini.algorithm.prepare(new_N, mini, seed=step * _SEEDS_PER_ROLLOUT + number)

    def _learning_rate(self, update: int) -> float:
        return self.config.actor.adam.lr * min(1.0, update / max(1, self._warmup))

    @property
    def _warmup(self) -> int:
        actor, train, rollout = self.config.actor, self.config.train, self.config.rollout
        chunks = group_chunks(
            self.config.samples_per_rollout, rollout.n_samples_per_prompt, train.batch_size
        )
        return warmup_steps(actor, self.steps * len(list(chunks)) * train.max_epochs)

    def _build_algorithm(self) -> Algorithm:
        name, options, _ = algorithm_options(self.config)
        measured: dict[str, Any] = {}
        if prompts := initial_entropy_prompts(self.config):
            rollout = self._rollout(
                self.train_problems[:prompts], derived_seed(self._seed(_TRAINING), 0)
            )
            entropies_N, segments = rollout.sampled.entropies_N, rollout.sampled.segments
            measured["h_ini"] = float(mean_entropies(entropies_N, segments).mean())
        return get_algorithm(name, warn=False, **options, **measured)

    # ---- evaluation
    # ---------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Held-out problems, sampled and greedy; the last evaluation has more of them."""
        started = time.perf_counter()
        samples = self.evaluation.samples
        problems = self.held_out[
            : self.evaluation.last_problems if step == self.steps else self.evaluation.problems
        ]
        together = max(1, _EVALUATED_TOGETHER // samples)
        rollouts = [
            self._rollout(
                problems[start : start + together],
                derived_seed(self._seed(_EVALUATIONS), step, start),
                samples,
            )
            for start in range(0, len(problems), together)
        ]
        greedy = self._rollout(problems, self._seed(_GREEDY), samples=1, greedy=True)
        found = self._describe(_joined(rollouts))
        solved = [int(count) for part in rollouts for count in part.scores.view(-1, samples).sum(1)]
        ks = [k for k in (1, 2, 4, 8, 16) if k <= samples]
        found |= {
            f"pass@{k}": fmean(pass_at_k(samples, correct, k) for correct in solved) for k in ks
        }
        found |= {
            "greedy_accuracy": float(greedy.scores.mean()),
            "seconds": time.perf_counter() - started,
        }
        return {"step": step, "problems": len(problems)} | {
            name: _rounded(value) for name, value in found.items()
        }

    def _describe(self, rollout: Rollout) -> dict[str, float]:
        """Means over completions; of tokens, where it is about entropy. NaN where there are
        none."""
        sampled, right_B = rollout.sampled, rollout.scores >= 1
        short_B = sampled.segments.lengths_B <= self.short_tokens
        entropies = [
            ("entropy", torch.ones_like(right_B)),
            ("entropy_right", right_B),
            ("entropy_wrong", ~right_B),
        ]
        spread = {name: sampled.segments.spread(rows_B) for name, rows_B in entropies}
        found = {
            "accuracy": rollout.scores.mean(),
            "reward": rollout.rewards.mean(),
            "length": sampled.segments.lengths_B.double().mean(),
            "ended": (~sampled.truncated_B).double().mean(),
            "short": short_B.double().mean(),
            "completion_entropy": mean_entropies(sampled.entropies_N, sampled.segments).mean(),
            **{
                name: values_B.double().mean()
                for name, values_B in rollout.logs.items()
                if name != "accuracy"
            },
            **{
                f"accuracy_{name}": rollout.scores[rows_B].mean()
                for name, rows_B in (("short", short_B), ("long", ~short_B))
            },
            **{
                name: sampled.entropies_N[rows_N].double().mean() for name, rows_N in spread.items()
            },
        }
        return {name: float(value) for name, value in found.items()}

    # ---- input
    # ----------------------------------------------------------------------------------------------

    def _problems(self, path: str) -> list[Problem]:
        return load_problems(
            path, self.config.data.input_key or "", self.config.data.label_key or ""
        )

    def _shuffled(self, problems: list[Problem]) -> list[Problem]:
        random.Random(self.config.train.seed).shuffle(problems)
        return problems

    def _seed(self, who: int) -> int:
        return derived_seed(self.config.train.seed, who)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")


def _completion_logits(
    model: Any, prompts: Sequence[list[int]], rows: Sequence[list[int]], device: torch.device
) -> Tensor:
    """(N, V) of the places from which the completions' tokens are drawn."""
    sequences = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
    longest = max(map(len, sequences))
    ids_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences], device=device)
    lengths_B = torch.tensor([len(ids) for ids in sequences], device=device)[:, None]
    starts_B = torch.tensor([len(ids) for ids in prompts], device=device)[:, None]
    place_L = torch.arange(longest, device=device)[None]
    drawn_BL = (place_L >= starts_B - 1) & (place_L < lengths_B - 1)
    # padding stands behind, where a causal model does not see it
    hidden_BLD = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden_BLD[drawn_BL]).float()


def _by_length(
    prompts: Sequence[list[int]], rows: Sequence[list[int]], size: int
) -> Iterator[list[int]]:
    """Micro-batches of similar lengths: little padding."""
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]) + len(rows[i]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _adam(model: torch.nn.Module, config: RunConfig) -> torch.optim.AdamW:
    adam = config.actor.adam
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": adam.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps)


def _joined(rollouts: Sequence[Rollout]) -> Rollout:
    return Rollout(
        prompts=[ids for part in rollouts for ids in part.prompts],
        sampled=Sampled.joined([part.sampled for part in rollouts]),
        rewards=torch.cat([part.rewards for part in rollouts]),
        scores=torch.cat([part.scores for part in rollouts]),
        logs={name: torch.cat([part.logs[name] for part in rollouts]) for name in rollouts[0].logs},
    )


def run_assignment(given: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of an assigned run (``runs.execute`` writes assignments)."""
    torch.set_num_threads(1 if given["device"] == "cpu" else torch.get_num_threads())
    run = StudyRun(
        resolve(given["options"], given["seed"]),
        policy=given["policy"],
        train=given["train"],
        heldout=given["heldout"],
        steps=given["steps"],
        evaluation=Evaluation(**given["evaluation"]),
        short_tokens=given["short_tokens"],
        device=given["device"],
    )
    return run.run()
