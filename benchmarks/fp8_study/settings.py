"""What a study measures, read from a YAML file over the defaults for this kind of machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fp8_study.runs import RUNS
from openrlhf_ext.fp8.recipe import Recipe

KINDS = ("linear", "products", "layers", "engine", "mismatch", "run")
_NAMES = ("blockwise", "current", "delayed")
RECIPES = {
    "blockwise": Recipe("blockwise", "e4m3"),
    "blockwise_pow2": Recipe("blockwise", "e4m3", "pow2"),
    "current": Recipe("current", "hybrid"),
    "delayed": Recipe("delayed", "hybrid"),
    "blockwise_mlp": Recipe("blockwise", "e4m3", modules="mlp"),
    "current_mlp": Recipe("current", "hybrid", modules="mlp"),
    "delayed_mlp": Recipe("delayed", "hybrid", modules="mlp"),
}
_FOLDER = Path(__file__).parent


class SettingsError(ValueError):
    """A study that cannot be measured; the text names option, rule, value and remedy."""


class Rule(NamedTuple):
    """What an option may be."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(holds(item) for item in value)


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_list(shape, _is_count) and len(shape) == 2 for shape in value.values()
    )


def _is_variants(value: Any) -> bool:
    return isinstance(value, list) and all(item in ("recompute", "many") for item in value)


COUNT = Rule("a whole number of 1 or more", _is_count)
NUMBER = Rule("a number above 0", _is_number)
PEAK = Rule("a number above 0, or null for none", lambda value: value is None or _is_number(value))
COUNTS = Rule("a list of whole numbers of 1 or more", lambda value: _is_list(value, _is_count))
SHAPES = Rule("names with [inputs, outputs] each", _is_shapes)


def _some_of(names: Any) -> Rule:
    return Rule(
        f"a list of some of {', '.join(names)}",
        lambda value: _is_list(value, lambda item: item in names),
    )


RULES: dict[str, Any] = {
    "kinds": _some_of(KINDS),
    "recipes": _some_of(_NAMES),
    "linear": {
        "tokens": COUNT,
        "inputs": COUNT,
        "outputs": COUNT,
        "micro_batches": COUNT,
        "bound": NUMBER,
        "bound_of_fp32_blocks": NUMBER,
    },
    "products": {
        "tokens": COUNT,
        "tensor_parallel": COUNTS,
        "repeats": COUNT,
        "columns": SHAPES,
        "rows": SHAPES,
    },
    "layers": {
        "num_layers": COUNT,
        "hidden": COUNT,
        "heads": COUNT,
        "kv_heads": COUNT,
        "head_dim": COUNT,
        "mlp": COUNT,
        "vocabulary": COUNT,
        "sequences": COUNTS,
        "tensor_parallel": COUNTS,
        "mlp_only": _some_of(_NAMES),
        "variants": Rule("a list of some of recompute, many, or an empty one", _is_variants),
        "micro_batches": COUNT,
        "many_micro_batches": COUNT,
        "repeats": COUNT,
    },
    "engine": {
        "num_layers": COUNT,
        "sequences": COUNT,
        "prompt_tokens": COUNT,
        "new_tokens": COUNT,
    },
    "run": {
        "ways": _some_of(RUNS),
        "steps": COUNT,
        "prompts": COUNT,
        "samples": COUNT,
        "new_tokens": COUNT,
        "num_layers": COUNT,
        "hidden": COUNT,
        "heads": COUNT,
        "kv_heads": COUNT,
        "mlp": COUNT,
    },
    "peak_bf16_tflops": PEAK,
    "peak_fp8_tflops": PEAK,
    "cell_seconds": NUMBER,
    "build_seconds": NUMBER,
}


def read_study(file: Path | None, *, on_gpu: bool) -> dict[str, Any]:
    """The study of a file over the defaults; the defaults alone where there is no file.

    Raises:
        SettingsError: the file cannot be read, or an option breaks a rule.
    """
    defaults = _load(_FOLDER / ("gpu.yaml" if on_gpu else "cpu.yaml"))
    given = {} if file is None else _load(file)
    study = _merged(given, defaults, RULES, "", file)
    _require_divisible(study)
    return study


def _load(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise SettingsError(
            f"a study is read with PyYAML, which cannot be imported here ({error}): give "
            "--bundle, which has it"
        ) from error
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{file} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(
            f"{file} must have options and their values, like {_FOLDER / 'gpu.yaml'}; got {found!r}"
        )
    return found


def _merged(
    given: Any, defaults: dict, rules: dict[str, Any], prefix: str, file: Path | None
) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SettingsError(
            f"{file}: {prefix[:-1]} must have options of its own ({', '.join(rules)}), got "
            f"{given!r}"
        )
    for name in given:
        if name not in rules:
            raise SettingsError(
                f"{file}: there is no option {prefix}{name}; these are known here: "
                f"{', '.join(rules)}"
            )
    merged = {}
    for name, rule in rules.items():
        value = given.get(name, {} if isinstance(rule, dict) else defaults[name])
        if isinstance(rule, dict):
            value = _merged(value, defaults[name], rule, f"{prefix}{name}.", file)
        elif not rule.holds(value):
            raise SettingsError(
                f"{file}: {prefix}{name} must be {rule.words}, got {value!r}; the default is "
                f"{defaults[name]!r}"
            )
        merged[name] = value
    return merged


def _require_divisible(study: dict[str, Any]) -> None:
    """FP8's products of TransformerEngine want widths and tokens that 16 divides (its
    module/linear.py asserts)."""
    for option, value in _widths(study):
        if value % 16:
            raise SettingsError(
                f"{option} must be a multiple of 16, got {value:g}: choose the next one, or "
                "fewer ranks"
            )
    layers = study["layers"]
    if layers["heads"] % layers["kv_heads"]:
        raise SettingsError(
            f"layers.heads must be a multiple of layers.kv_heads, got {layers['heads']} and "
            f"{layers['kv_heads']}"
        )
    for ranks in layers["tensor_parallel"]:
        if layers["heads"] % ranks:
            raise SettingsError(
                f"layers.heads {layers['heads']} must be a multiple of {ranks} ranks: choose fewer"
            )


def rank_sizes(settings: dict[str, Any], ranks: int) -> dict[str, int]:
    """Heads, key-value heads and MLP width of one of so many tensor-parallel ranks; a key-value
    head is not cut."""
    kv_heads = max(1, settings["kv_heads"] // ranks)
    return {
        "heads": settings["heads"] // ranks,
        "kv_heads": kv_heads,
        "mlp": settings["mlp"] // ranks,
    }


def _widths(study: dict[str, Any]) -> list[tuple[str, float]]:
    linear, products, layers = study["linear"], study["products"], study["layers"]
    found = [(f"linear.{name}", linear[name]) for name in ("tokens", "inputs", "outputs")]
    found += [("products.tokens", products["tokens"])]
    found += [
        (f"layers.{name}", layers[name]) for name in ("hidden", "head_dim", "mlp", "vocabulary")
    ]
    found += [("layers.sequences", tokens) for tokens in layers["sequences"]]
    for name in ("mlp", "heads"):
        width = layers[name] * (layers["head_dim"] if name == "heads" else 1)
        found += [(f"layers.{name} over {n} ranks", width / n) for n in layers["tensor_parallel"]]
    for cut in ("columns", "rows"):
        for name, shape in products[cut].items():
            found += [(f"products.{cut}.{name}", width) for width in shape]
            cut_width = shape[1] if cut == "columns" else shape[0]
            found += [
                (f"products.{cut}.{name} over {n} ranks", cut_width / n)
                for n in products["tensor_parallel"]
            ]
    return found
