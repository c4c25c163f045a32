"""A language model of a million parameters that is careless in arithmetic: the policy that the
quickstart trains.

Reinforcement learning needs a policy that is sometimes right. This script makes one from nothing in
a minute or two:

1. a Qwen2 architecture (4 layers, width 128, head size 32, fp32) and a byte-level tokenizer without
   merges: every text has tokens, every digit is one token, and so are
   ``<reasoning> </reasoning> <answer> </answer>``;
2. a warm start by ``openrlhf_ext.cli.train_sft`` in two runs on problems of the train split
   (toy_task.py): first a careful teacher's solutions, until the model knows its arithmetic, then
   the homework of a careless teacher, who gets two steps in five wrong. Both go on from what they
   wrote. The model copies the carelessness, not only the
   knowledge: its most likely step is right, a sampled one often not. Sampled accuracy (temperature
   1) ends within 25-45 %. What the teachers write besides is the family (``FAMILIES``): direct
      answers, damaged tags;
3. an ordinary Hugging Face checkpoint, which plain transformers and vLLM load.

What reinforcement learning then has to find out is which of its own habits pay. The checkpoint is
cached by a hash of this code and its settings; a second call copies it within a second.

Left out on purpose: a learned subword vocabulary and a chat template with roles (tokens cost time
on a CPU), bf16.

    python examples/python/toy_policy.py --output_dir runs/toy/warm_start --data_dir runs/toy/data
    python examples/python/toy_policy.py --output_dir runs/fork/warm_start --family fork --seed 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reward_arithmetic
import toy_task
from toy_task import Problem, Solution

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

# transformers 5 loads the tokenizer of every qwen2 model as Qwen2Tokenizer, which adds
# <|endoftext|> if it is missing.
PAD, EOS = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", EOS)
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' "
    "%}<|im_end|>{% endif %}{% endfor %}"
)
FILLERS = ("", "hm ", "so ", "well ", "let me see ", "step by step ")
MAX_NEW_TOKENS = 48  # the longest correct completion has 33
MARKER = "toy_policy.json"
STEP = re.compile(r" *(\d+)/\d+ ")
SHOWN_EVERY = 100  # steps of the warm start


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Everything that decides the weights; part of the cache key."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 2048  # room for real questions, a token a byte
    initializer_range: float = 0.05
    largest_value: int = 9  # of a problem
    knowledge_steps: int = 900
    # over the careful teacher's completions, where the steps can be divided by it
    knowledge_passes: int = 1
    knowledge_slip_rate: float = 0.1  # of the careful teacher, per step of a solution
    careless_steps: int = 120
    slip_rate: float = 0.4  # the same of the careless teacher
    slips: tuple[int, ...] = (-1, 1)  # what a wrong step adds to the right result
    batch_size: int = 16
    lr: float = 3e-3
    careless_lr: float = 5e-4
    direct_knowledge: float = 0.0  # share of answers without steps, of the careful teacher
    direct_careless: float = 0.0  # the same of the careless one, whose direct answers are right
    # what stands in the place of the steps of a direct answer: it decides how long that is
    direct_filler: str = ""
    # share of the careless teacher's completions with one tag missing, or the middle two swapped
    damaged: float = 0.0
    # the careless teacher begins some reasoning with filler: steps stand at different places
    shift: bool = False
    seed: int = 42

    @property
    def passes(self) -> int:
        return 1 if self.knowledge_steps % self.knowledge_passes else self.knowledge_passes

    @property
    def careful_completions(self) -> int:
        return self.knowledge_steps // self.passes * self.batch_size

    @property
    def careless_completions(self) -> int:
        return self.careless_steps * self.batch_size


_TWO_DIGITS = {
    "largest_value": 50,
    "slips": (-10, -1, 1, 10),
    "knowledge_passes": 3,
    "knowledge_slip_rate": 0.0,
}
_FORK = _TWO_DIGITS | {
    "knowledge_steps": 1800,
    "careless_steps": 120,
    "slip_rate": 0.15,
    "direct_knowledge": 0.3,
    "direct_careless": 0.994,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # One digit: all facts are known before the warm start ends, so that its end does not depend on
    # a processor's rounding. A careful teacher who never slips would leave open whether the next
    # step copies the last result or computes it again, and the careless steps would have to teach
    # that.
    "chain": {},
    # a direct answer is likely and mostly wrong, for the policy cannot compute without steps; steps
    # are rare and mostly right: about 0.5 % of samples, or 2.5 %
    "fork": _FORK,
    "fork_frequent": _FORK | {"direct_careless": 0.968},
    # the same choice where the rare right answers are as long as the others, or a third as long (22
    # tokens)
    "fork_equal": _FORK | {"direct_filler": "the answer is: "},
    "fork_short": _FORK
    | {"direct_filler": "let me see, this is not hard, so here is the answer at once: "},
    # the form has to be learnt beside the arithmetic
    "tags": _TWO_DIGITS
    | {"knowledge_steps": 1440, "careless_steps": 120, "slip_rate": 0.2, "damaged": 0.3},
}
"""What the settings of a family of policies are, where they are not the defaults."""


def family_settings(
    family: str, *, shift: bool = False, seed: int = PolicySettings.seed
) -> PolicySettings:
    """Settings of a policy of that family; raises ValueError if there is none of that name."""
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return PolicySettings(**FAMILIES[family], shift=shift, seed=seed)


def build_tokenizer(model_max_length: int = PolicySettings.max_positions) -> Qwen2Tokenizer:
    """Byte-level tokenizer of 263 tokens: 3 special ones, 4 tags (kept by ``skip_special_tokens``),
    256 bytes."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    words = [*SPECIAL_TOKENS, *TAGS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(settings: PolicySettings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """The untrained policy, initialized from ``settings.seed``."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    token_ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.max_positions,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        **token_ids,
    )
    torch.manual_seed(settings.seed)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **token_ids
    )
    return model


def build_policy(
    out_dir: Path, settings: PolicySettings | None = None, log: bool = False
) -> dict[str, list[float]]:
    """Trains a policy from nothing and saves model and tokenizer to ``out_dir``. Returns the losses
    of each teacher's steps (nats per token). Raises RuntimeError: a supervised run failed."""
    from transformers.utils import logging as transformers_logging

    settings = settings or PolicySettings()
    tokenizer = build_tokenizer(settings.max_positions)
    transformers_logging.disable_progress_bar()
    completions = _examples(settings)
    losses = {}
    with tempfile.TemporaryDirectory(prefix=".toy_policy-", dir=out_dir.parent) as scratch:
        start = Path(scratch) / "untrained"
        build_model(settings, tokenizer).save_pretrained(start)
        tokenizer.save_pretrained(start)
        for teacher, count, options in _teachers(settings):
            data, out = Path(scratch) / f"{teacher}.jsonl", Path(scratch) / teacher
            records = (
                {"question": p.question, "answer": text + EOS}
                for p, text in islice(completions, count)
            )
            data.write_text(
                "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
            )
            if log:
                print(f"the {teacher} teacher: {count} completions", flush=True)
            losses[teacher] = _supervised(start, data, out, options, settings, log)
            start = out
        for name in ("training.png", "metrics.jsonl", "events.jsonl"):
            (start / name).unlink()
        shutil.copytree(start, out_dir, dirs_exist_ok=True)
    return losses


def _teachers(settings: PolicySettings) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, completions, and options of the run that learns them."""
    yield (
        "careful",
        settings.careful_completions,
        {
            "train.max_epochs": settings.passes,
            "adam.lr": settings.lr,
            "min_lr_ratio": 0.05,
        },
    )
    yield (
        "careless",
        settings.careless_completions,
        {
            "train.max_epochs": 1,
            "adam.lr": settings.careless_lr,
            "lr_scheduler": "linear",
            "lr_warmup_ratio": 0,
        },
    )


def _supervised(
    model: Path, data: Path, out: Path, options: dict[str, Any], settings: PolicySettings, log: bool
) -> list[float]:
    """One run of ``train_sft``, in one process on the CPU; the loss of every step."""
    given = {
        "model.model_name_or_path": model,
        "data.dataset": data,
        "data.input_key": "question",
        "data.output_key": "answer",
        "data.input_template": "null",
        "data.max_len": 256,
        "megatron.param_dtype": "fp32",
        "train.batch_size": settings.batch_size,
        "train.micro_batch_size": settings.batch_size,
        "train.seed": settings.seed,
        "adam.betas": (0.9, 0.98),
        "adam.weight_decay": 0.01,
        "ckpt.output_dir": out,
        "ckpt.path": out / "checkpoints",
    } | options
    words = [word for name, value in given.items() for word in (f"--{name}", *_words(value))]
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_sft", *words]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    last: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last, line][-20:]
            if log and (step := STEP.match(line)) and int(step[1]) % SHOWN_EVERY == 0:
                print(f"  {line.rstrip()}", flush=True)
    if process.returncode:
        raise RuntimeError(f"train_sft ended with {process.returncode}:\n{''.join(last)}")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss/sft"] for line in lines]


def _words(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, tuple) else (value,)))


def careless_solution(
    problem: Problem,
    rng: random.Random,
    slip_rate: float,
    slips: tuple[int, ...] = PolicySettings.slips,
) -> Solution:
    """A solution in which each step's result is wrong with probability ``slip_rate``, by one of the
    ``slips``."""

    def write_result(result: int) -> int:
        if rng.random() >= slip_rate:
            return result
        return result + rng.choice([slip for slip in slips if slip > 0 or result + slip >= 0])

    return problem.solve(write_result)


def direct_answer(solution: Solution, filler: str = "") -> str:
    """The answer without the steps, after a filler that says nothing."""
    return f"<reasoning>{filler}</reasoning><answer>{solution.answer}</answer>"


def damaged(completion: str, rng: random.Random) -> str:
    """One of the four tags is missing, or the middle two are swapped."""
    kind = rng.randrange(len(TAGS) + 1)
    if kind == len(TAGS):
        return completion.replace("</reasoning><answer>", "<answer></reasoning>", 1)
    return completion.replace(TAGS[kind], "", 1)


def problems_of(settings: PolicySettings, split: toy_task.Split) -> Iterator[Problem]:
    """Endless problems of that split."""
    return toy_task.problem_stream(settings.seed, split, largest_value=settings.largest_value)


def _examples(settings: PolicySettings) -> Iterator[tuple[Problem, str]]:
    """The teachers' completions, in training order; never a held-out problem."""
    rng = random.Random(settings.seed)
    for index, problem in enumerate(problems_of(settings, "train")):
        teacher = _careful_teacher if index < settings.careful_completions else _careless_teacher
        yield problem, teacher(problem, rng, settings)


def _careful_teacher(problem: Problem, rng: random.Random, settings: PolicySettings) -> str:
    # the draw is made in any case: shares of 0 leave the careless teacher's random numbers as they
    # are
    solution = careless_solution(problem, rng, settings.knowledge_slip_rate, settings.slips)
    if _happens(settings.direct_knowledge, rng):
        return direct_answer(solution, settings.direct_filler)
    return solution.completion


def _careless_teacher(problem: Problem, rng: random.Random, settings: PolicySettings) -> str:
    if _happens(settings.direct_careless, rng):
        text = direct_answer(problem.solution, settings.direct_filler)
    else:
        text = careless_solution(problem, rng, settings.slip_rate, settings.slips).completion
        if settings.shift:
            text = text.replace("<reasoning>", "<reasoning>" + rng.choice(FILLERS), 1)
    return damaged(text, rng) if _happens(settings.damaged, rng) else text


def _happens(share: float, rng: random.Random) -> bool:
    return share > 0 and rng.random() < share


def sampled_accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Problem],
    *,
    seed: int = 0,
    greedy: bool = False,
    batch_size: int = 256,
) -> float:
    """Share of problems whose completion is graded correct: one sample each at temperature 1, or
    the greedy one."""
    import torch

    correct = 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(problems), batch_size):
            batch = problems[start : start + batch_size]
            for problem, completion in zip(
                batch, _complete(model, tokenizer, batch, greedy), strict=True
            ):
                correct += reward_arithmetic.grade(completion, problem.solution.label).correct
    return correct / len(problems)


def _complete(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], greedy: bool
) -> list[str]:
    prompts = tokenizer(
        [p.question for p in problems], padding=True, padding_side="left", return_tensors="pt"
    )
    choice: dict[str, Any] = (
        {"do_sample": False, "top_k": None, "top_p": None, "temperature": None} if greedy else {}
    )
    output = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, **choice)
    return tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])


def cached_policy(cache_dir: Path, settings: PolicySettings, heldout_size: int = 512) -> Path:
    """The folder of the trained policy for these settings; trains it first if the cache does not
    have it.

    The checkpoint is written beside its final place and renamed, so that an interrupted run leaves
    nothing half-made.
    """
    folder = cache_dir / f"toy_policy-{cache_key(settings)}"
    if (folder / MARKER).is_file():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".toy_policy-", dir=cache_dir) as scratch:
        draft = Path(scratch) / "policy"
        _train_into(draft, settings, heldout_size)
        _move_into_place(draft, folder)
    return folder


def cache_key(settings: PolicySettings) -> str:
    """Hash of the settings and of the code that turns them into weights."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for source in (Path(__file__), Path(toy_task.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _train_into(folder: Path, settings: PolicySettings, heldout_size: int) -> None:
    print(
        f"warm start: {settings.knowledge_steps + settings.careless_steps} steps of supervised "
        "training",
        flush=True,
    )
    start = time.monotonic()
    losses = build_policy(folder, settings, log=True)
    seconds = time.monotonic() - start
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    print(f"measuring it on {heldout_size} held-out problems, sampled and greedy", flush=True)
    model, tokenizer = (
        Qwen2ForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    problems = toy_task.distinct_problems(problems_of(settings, "heldout"), heldout_size)
    marker = {
        "key": cache_key(settings),
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "warm_start_seconds": round(seconds, 1),
        "losses": {teacher: (of_steps[0], of_steps[-1]) for teacher, of_steps in losses.items()},
        "heldout_problems": len(problems),
        "heldout_accuracy_sampled": sampled_accuracy(model, tokenizer, problems),
        "heldout_accuracy_greedy": sampled_accuracy(model, tokenizer, problems, greedy=True),
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _move_into_place(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        # otherwise another process was faster with the same policy
        if not (folder / MARKER).is_file():
            raise


def copy_policy(source: Path, output_dir: Path) -> None:
    """Copies a cached policy to ``output_dir``, replacing an older toy policy there.

    Raises:
        FileExistsError: ``output_dir`` holds something else.
    """
    if output_dir.exists():
        if any(output_dir.iterdir()) and not (output_dir / MARKER).is_file():
            raise FileExistsError(
                f"--output_dir must be new, empty or hold a toy policy ({MARKER}): {output_dir}"
            )
        shutil.rmtree(output_dir)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = output_dir.with_name(f".{output_dir.name}.{os.getpid()}")
    shutil.copytree(source, draft)
    draft.rename(output_dir)


def default_cache_dir() -> Path:
    """``$OPENRLHF_EXT_CACHE``, or ``~/.cache/openrlhf_ext``."""
    return Path(os.environ.get("OPENRLHF_EXT_CACHE") or "~/.cache/openrlhf_ext").expanduser()


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # What to write
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--data_dir",
        type=Path,
        help="folder for train.jsonl and heldout.jsonl (default: not written)",
    )
    parser.add_argument("--train_size", type=int, default=4096, help="problems in train.jsonl")
    parser.add_argument(
        "--heldout_size",
        type=int,
        default=512,
        help="problems in heldout.jsonl, and of the accuracy",
    )
    # The warm start
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default="chain",
        help="what the teachers write (docs/science.md)",
    )
    parser.add_argument(
        "--shift",
        action="store_true",
        help="random filler before the steps of the careless teacher",
    )
    parser.add_argument(
        "--seed", type=int, default=PolicySettings.seed, help="of the weights and of the problems"
    )
    parser.add_argument(
        "--knowledge_steps", type=int, help="of the careful teacher (default: the family's)"
    )
    parser.add_argument(
        "--careless_steps", type=int, help="of the careless teacher (default: the family's)"
    )
    parser.add_argument(
        "--slip_rate",
        type=float,
        help="share of the careless teacher's wrong steps (default: the family's)",
    )
    # Where and how
    parser.add_argument(
        "--cache_dir", type=Path, default=default_cache_dir(), help="cache (or OPENRLHF_EXT_CACHE)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch; more gain little"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = _parse_arguments(argv)
    given = {
        name: getattr(args, name) for name in ("knowledge_steps", "careless_steps", "slip_rate")
    }
    settings = replace(
        family_settings(args.family, shift=args.shift, seed=args.seed),
        **{name: value for name, value in given.items() if value is not None},
    )
    # read when torch is imported, only if there is training to do
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    # transformers imports DeepSpeed when it saves, which warns of a machine without GPU unless it
    # is told
    os.environ["DS_ACCELERATOR"] = "cpu"
    folder = cached_policy(args.cache_dir, settings, args.heldout_size)
    copy_policy(folder, args.output_dir)
    marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    print(f"policy: {args.output_dir} ({marker['parameters']:,} parameters, cached in {folder})")
    print(
        f"held-out accuracy: {marker['heldout_accuracy_sampled']:.1%} sampled at temperature 1, "
        f"{marker['heldout_accuracy_greedy']:.1%} greedy ({marker['heldout_problems']} problems)"
    )
    if args.data_dir:
        sizes = {"train_size": args.train_size, "heldout_size": args.heldout_size}
        paths = toy_task.write_task(
            args.data_dir, **sizes, seed=args.seed, largest_value=settings.largest_value
        )
        for split, path in paths.items():
            print(f"{split} problems: {path}")


if __name__ == "__main__":
    main()
