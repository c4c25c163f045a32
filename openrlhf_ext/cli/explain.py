"""``python -m openrlhf_ext.cli.explain``: see what a method does to the tokens of a group of completions.

    python -m openrlhf_ext.cli.explain --algorithm gtpo_entropy --rollouts examples/data/explain_rollouts.jsonl
    python -m openrlhf_ext.cli.explain --algorithm gtpo_conflict --rollouts FILE --group 2 --png picture.png

The whole file is shaped as one batch, as in training; one group of it is shown. Options without a default take their
published values. Exit status: 0; 2 if something given is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.reporting.explain import Completion, Explanation, Quantity, render, write_png

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf_ext.algorithms import Algorithm, RolloutBatch, ShapedBatch

_PNG_WIDTH = 200
_NARROWEST = 40
_TOKEN_NUMBERS = ("logprobs", "entropies", "ref_logprobs", "guide_logprobs", "values")
_REQUIRED = ("group", "prompt", "tokens", "token_ids", "reward", "logprobs", "entropies")
_OPTIONAL = (*_TOKEN_NUMBERS[2:], "truncated", "from_guide")
_IGNORED = ("comment", "rollout_logprobs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        rollouts = read_rollouts(Path(arguments.rollouts))
        explanation = explain(rollouts, arguments.algorithm, parse_options(arguments.option), arguments.group)
        if arguments.png:
            write_png(explanation, arguments.png, width=arguments.width or _PNG_WIDTH)
    except (ValueError, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    colour = sys.stdout.isatty() and not arguments.no_color and not os.environ.get("NO_COLOR")
    _print(render(explanation, width=arguments.width or shutil.get_terminal_size((100, 24)).columns, colour=colour))
    if arguments.png:
        print(f"explain: wrote {arguments.png}", file=sys.stderr)
    return 0


def _print(text: str) -> None:
    """Print what the output's encoding can show, to a reader that may leave early."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # head has seen enough; without this, the flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m openrlhf_ext.cli.explain", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--algorithm", required=True, metavar="NAME", help="method, as in --algo.advantage.estimator")
    add("--rollouts", required=True, metavar="FILE.jsonl", help="one completion per line; see docs/explain.md")
    add("--group", metavar="ID", help="the group to show (default: the first of the file)")
    add("--option", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="options of the method")
    add("--png", metavar="OUT.png", help="also draw the picture into this file")
    add("--width", type=_width, help=f"characters of a line (default: the terminal's; {_PNG_WIDTH} in the PNG)")
    add("--no_color", action="store_true", help="numbers instead of colours, as where the output is no terminal")
    return parser


def _width(text: str) -> int:
    if (value := int(text)) < _NARROWEST:
        raise argparse.ArgumentTypeError(f"must be at least {_NARROWEST}, got {value}")
    return value


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["alpha1=1.0", "entropy_axis=row"]`` as a mapping; values are JSON, or text where they are not.

    Raises:
        ValueError: no equals sign, or a key given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not (key and sign):
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        if key in options:
            raise ValueError(f"--option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


# --- rollouts file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """One completion: its group's name, and the keys of its line."""

    group: str
    line: int
    record: dict[str, Any]

    def __len__(self) -> int:
        return len(self.record["tokens"])


def read_rollouts(path: Path) -> list[Rollout]:
    """Read and check a rollouts file, one JSON object per completion; blank lines are skipped.

    Raises:
        ValueError: naming the line, the key and the rule that it breaks.
    """
    rollouts: list[Rollout] = []
    # Not splitlines: it also splits at line separators that may stand inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rollouts.append(_parse_line(line, number))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not rollouts:
        raise ValueError(f"{path} holds no completion")
    _check_together(path, rollouts)
    return rollouts


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse_line(line: str, number: int) -> Rollout:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a completion must be a JSON object, got {type(record).__name__}")
    if missing := [key for key in _REQUIRED if key not in record]:
        raise ValueError(f"missing {', '.join(missing)}; a completion needs {', '.join(_REQUIRED)}")
    for key in ("tokens", *record):
        _check_key(key, record[key], record)
    return Rollout(str(record["group"]), number, record)


def _check_key(key: str, value: Any, record: dict[str, Any]) -> None:
    known = (*_REQUIRED, *_OPTIONAL, *_IGNORED)
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown key {key!r}{hint} Known keys: {', '.join(known)}")
    if key in _SCALARS:
        wanted, holds = _SCALARS[key]
        if not holds(value):
            raise ValueError(f"{key} must be {wanted}, got {value!r}")
    elif key not in _IGNORED:
        _check_list(key, value, len(record["tokens"]) if isinstance(record["tokens"], list) else 0)


def _check_list(key: str, values: Any, tokens: int) -> None:
    wanted, holds = _LISTS[key]
    if not isinstance(values, list):
        raise ValueError(f"{key} must be a list with one entry per token, got {type(values).__name__}")
    if not values:
        raise ValueError(f"{key} is empty; every completion needs at least one token")
    if len(values) != tokens:
        raise ValueError(f"{key} has {len(values)} entries, tokens has {tokens}; one entry per token is needed")
    for index, value in enumerate(values):
        if not holds(value):
            raise ValueError(f"{key}[{index}] must be {wanted}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_logprob(value: Any) -> bool:
    # Rounding may leave the log-prob of a certain token a little above 0.
    return _is_number(value) and value <= 1e-3


def _is_entropy(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_Rule = tuple[str, Callable[[Any], bool]]
_LOGPROB: _Rule = ("a log-probability: a finite number, at most 0", _is_logprob)
_SCALARS: dict[str, _Rule] = {
    "group": ("an integer or a text", lambda value: _is_id(value) or _is_text(value)),
    "prompt": ("a text", _is_text),
    "reward": ("a finite number", _is_number),
    "truncated": ("true or false", _is_flag),
    "from_guide": ("true or false", _is_flag),
}
_LISTS: dict[str, _Rule] = {
    "tokens": ("a text", _is_text),
    "token_ids": ("an integer", _is_id),
    "logprobs": _LOGPROB,
    "entropies": ("an entropy in nats: a finite number, at least 0", _is_entropy),
    "ref_logprobs": _LOGPROB,
    "guide_logprobs": _LOGPROB,
    "values": ("a finite number", _is_number),
}


def _check_together(path: Path, rollouts: Sequence[Rollout]) -> None:
    """One prompt for each group, and optional numbers on every line or on none."""
    first_of: dict[str, Rollout] = {}
    first = rollouts[0]
    for rollout in rollouts:
        leader = first_of.setdefault(rollout.group, rollout)
        if rollout.record["prompt"] != leader.record["prompt"]:
            raise ValueError(
                f"{path}, line {rollout.line}: prompt differs from that of line {leader.line}, both are of group "
                f"{rollout.group}; the completions of a group answer one prompt"
            )
        for key in _TOKEN_NUMBERS:
            if (key in rollout.record) != (key in first.record):
                having, lacking = (rollout, first) if key in rollout.record else (first, rollout)
                raise ValueError(
                    f"{path}: {key} is on line {having.line} and missing on line {lacking.line}; give it for every "
                    "completion or for none"
                )


# --- from rollouts to a picture ---------------------------------------------------------------------------------------


def explain(rollouts: Sequence[Rollout], name: str, options: dict[str, Any], group: str | None = None) -> Explanation:
    """Shape all rollouts as one batch and describe one group of them.

    Args:
        rollouts: complete groups.
        name: of the algorithm.
        options: of the algorithm; published values stand in for options without a default.
        group: the group to show, None for the first.

    Raises:
        ValueError: unknown algorithm, option or group, or rollouts that the algorithm refuses.
    """
    from openrlhf_ext.algorithms import get_algorithm, with_published_values

    rows = _rows_of(rollouts, rollouts[0].group if group is None else group)
    options = with_published_values(name, options, max_length=max(map(len, rollouts)))
    algorithm = get_algorithm(name, **options)
    batch = make_batch(rollouts)
    shaped = algorithm.prepare(batch.old_logprobs, algorithm.shape(batch), seed=0)
    quantities, notes = _quantities(algorithm, batch, shaped)
    shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
    return Explanation(
        title=f"{name}, group {rollouts[rows[0]].group}" + (f"  ({shown})" if shown else ""),
        prompt=rollouts[rows[0]].record["prompt"],
        notes=(_idea(algorithm), *notes, *_group_notes(shaped, rows)),
        completions=tuple(_completion(rollouts[row], algorithm, shaped, row) for row in rows),
        quantities=tuple(_of_group(quantity, shaped, rows) for quantity in quantities),
    )


def _rows_of(rollouts: Sequence[Rollout], group: str) -> list[int]:
    rows = [row for row, rollout in enumerate(rollouts) if rollout.group == group]
    if not rows:
        known = ", ".join(dict.fromkeys(rollout.group for rollout in rollouts))
        raise ValueError(f"--group {group!r} is not in the file; its groups are {known}")
    return rows


def make_batch(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """All completions, right-padded, float64; groups are numbered in the order of the file."""
    import torch

    from openrlhf_ext.algorithms import RolloutBatch

    numbers = {group: index for index, group in enumerate(dict.fromkeys(rollout.group for rollout in rollouts))}
    longest = max(map(len, rollouts))
    lengths = torch.tensor([len(rollout) for rollout in rollouts])

    def padded(key: str, dtype: torch.dtype) -> Tensor:
        rows = [rollout.record[key] + [0] * (longest - len(rollout)) for rollout in rollouts]
        return torch.tensor(rows, dtype=dtype)

    def flags(key: str) -> Tensor | None:
        if not any(key in rollout.record for rollout in rollouts):
            return None
        return torch.tensor([rollout.record.get(key, False) for rollout in rollouts])

    present = [key for key in _TOKEN_NUMBERS if key in rollouts[0].record]
    floats = {"old_logprobs" if key == "logprobs" else key: padded(key, torch.float64) for key in present}
    return RolloutBatch(
        tokens=padded("token_ids", torch.int64),
        mask=torch.arange(longest) < lengths[:, None],
        rewards=torch.tensor([rollout.record["reward"] for rollout in rollouts], dtype=torch.float64),
        group_ids=torch.tensor([numbers[rollout.group] for rollout in rollouts]),
        truncated=flags("truncated"),
        from_guide=flags("from_guide"),
        **floats,
    )


@dataclass(frozen=True)
class _TokenQuantity:
    """A panel before its group is cut out."""

    name: str
    meaning: str
    scale: Any
    values_BT: Tensor


def _quantities(
    algorithm: Algorithm, batch: RolloutBatch, shaped: ShapedBatch
) -> tuple[list[_TokenQuantity], list[str]]:
    """The panels that a method has, and what is said instead of a panel that would show nothing new."""
    import torch

    advantage_BT = shaped.advantages
    panels = [
        _TokenQuantity("entropy", "of the policy at this token, nats", "amount", batch.entropies),
        *_method_panels(shaped),
        _TokenQuantity("advantage", "above 0 makes the token likelier, below 0 rarer", "signed", advantage_BT),
    ]
    update_BT = first_update(algorithm, batch, shaped)
    if torch.allclose(update_BT, advantage_BT, rtol=1e-9, atol=1e-12):
        return panels, ["The first update pulls each token by its advantage: all tokens weigh the same."]
    meaning = "pull of the first update on the log-prob; the advantage, where all tokens weigh the same"
    return [*panels, _TokenQuantity("update", meaning, "signed", update_BT)], []


def _method_panels(shaped: ShapedBatch) -> Iterator[_TokenQuantity]:
    """Panels of the quantities that some methods expose and others do not."""
    names = shaped.names()
    if "Rpos" in names:
        reward_BT = _per_token(shaped["Rpos"] + shaped["Rneg"], shaped)
        yield _TokenQuantity("shaped reward", "before standardisation", "signed", reward_BT)
    if "token_mask" in names:
        yield _TokenQuantity("trained", "entropy is among the highest of the batch", "choice", shaped["token_mask"])
    if "cov" in names:
        yield _TokenQuantity("covariance", "(A - mean A)(log-prob - mean log-prob)", "deviation", shaped["cov"])
        yield _TokenQuantity("held back", "chosen by its covariance", "choice", shaped.selection)
    if "lambda" in names:
        meaning = "0 silences a conflict token, above 1 strengthens it"
        yield _TokenQuantity("lambda", meaning, "factor", shaped["lambda"])


def _per_token(values: Tensor, shaped: ShapedBatch) -> Tensor:
    return values[:, None].expand(shaped.mask.shape) if values.ndim == 1 else values


def first_update(algorithm: Algorithm, batch: RolloutBatch, shaped: ShapedBatch) -> Tensor:
    """(B, T) gradient of the objective in the log-probs, at the policy that sampled, times the tokens that count."""
    import torch

    logprobs_BT = batch.old_logprobs.clone().requires_grad_()
    (gradient_BT,) = torch.autograd.grad(algorithm.loss(logprobs_BT, shaped).value, logprobs_BT)
    return -gradient_BT * int(shaped.lengths[shaped.active].sum())


def _of_group(quantity: _TokenQuantity, shaped: ShapedBatch, rows: Sequence[int]) -> Quantity:
    lengths = shaped.lengths.tolist()
    values = tuple(tuple(map(float, quantity.values_BT[row, : lengths[row]].tolist())) for row in rows)
    return Quantity(quantity.name, quantity.meaning, quantity.scale, values)


def _idea(algorithm: Algorithm) -> str:
    """The first paragraph of what the method says about itself, on one line."""
    paragraph = (type(algorithm).__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.replace("`", "").split())


def _group_notes(shaped: ShapedBatch, rows: Sequence[int]) -> Iterator[str]:
    if not bool(shaped.kept[rows[0]]):
        yield "The group is dropped from the batch: all its completions are correct, or all are wrong."
    elif not bool(shaped.advantages[list(rows)].any()):
        yield "The group teaches nothing: all its advantages are 0."


def _completion(rollout: Rollout, algorithm: Algorithm, shaped: ShapedBatch, row: int) -> Completion:
    mark, verdict = _verdict(rollout, algorithm, shaped, row)
    reward, penalised = rollout.record["reward"], float(shaped.rewards[row])
    facts = [f"reward {reward:g}" + (f" (with penalties {penalised:g})" if penalised != reward else ""), verdict]
    facts.append("1 token" if len(rollout) == 1 else f"{len(rollout)} tokens")
    facts.append(f"mean entropy {sum(rollout.record['entropies']) / len(rollout):.3f}")
    if rollout.record.get("truncated"):
        facts.append("truncated" if bool(shaped.active[row]) or not bool(shaped.kept[row]) else "truncated: no loss")
    if "delta" in shaped.names() and float(shaped["delta"][row]) == 0:
        facts.append("removed by the entropy filter")
    return Completion(mark, ", ".join(fact for fact in facts if fact), tuple(rollout.record["tokens"]))


def _verdict(rollout: Rollout, algorithm: Algorithm, shaped: ShapedBatch, row: int) -> tuple[str, str]:
    """Mark and word for the class that the method puts a completion into."""
    if "A" in shaped.names():
        sign = float(shaped["A"][row])
        return ("+", "above the mean") if sign > 0 else ("-", "below the mean") if sign < 0 else (" ", "at the mean")
    threshold = getattr(algorithm.options, "success_threshold", None)
    if threshold is None:
        return " ", ""
    return ("✓", "correct") if rollout.record["reward"] > threshold else ("✗", "wrong")


if __name__ == "__main__":
    sys.exit(main())
