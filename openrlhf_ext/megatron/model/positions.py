"""Rotary embedding: what ``config.json`` says of it, its frequencies by transformers' own
functions, and what vLLM, which ignores some of the settings, is told of it instead. Reading needs
no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrlhf_ext.inputs import FLAG, NUMBER, Kind, is_integer, is_number, list_of

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, Any]
"""Of a model: ``rope_type``, ``rope_theta``, ``partial_rotary_factor`` unless it is 1, and the
fields of ``KINDS``."""

_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_POSITIVE = Kind("a number above 0", lambda value: NUMBER.holds(value) and value > 0)
_FACTOR = Kind("a number of at least 1", lambda value: NUMBER.holds(value) and value >= 1)
_BASE = Kind("a number above 1", lambda value: NUMBER.holds(value) and value > 1)
_LENGTH = Kind("an integer above 1", lambda value: is_integer(value) and value > 1)
_SHARE = Kind("a number above 0, at most 1", lambda value: NUMBER.holds(value) and 0 < value <= 1)
_NEEDED: dict[str, dict[str, Kind]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _POSITIVE,
        "high_freq_factor": _POSITIVE,
        _ORIGINAL: _LENGTH,
    },
    "yarn": {"factor": _FACTOR, _ORIGINAL: _LENGTH},
    "longrope": {
        "short_factor": list_of(_POSITIVE),
        "long_factor": list_of(_POSITIVE),
        _ORIGINAL: _LENGTH,
    },
}
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_OPTIONAL: dict[str, dict[str, Kind]] = {
    "yarn": {**dict.fromkeys(_YARN, _POSITIVE), "truncate": FLAG},
    "longrope": {"factor": _FACTOR, "attention_factor": _POSITIVE},
}
KINDS = {kind: {**needed, **_OPTIONAL.get(kind, {})} for kind, needed in _NEEDED.items()}
"""The kinds of rotary embedding that are built, and their fields."""
_REFUSED = {
    "dynamic": "its frequencies change with the length of a sequence, and vLLM's are NaN beyond the "
    "window"
}


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5), without what is
    null, and with what stands beside it, which comes first (transformers 5.19
    modeling_rope_utils.py:752, 783)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    found = {name: value for name, value in rope.items() if value is not None and name != "type"}
    found |= {"rope_type": kind, "rope_theta": found.get("rope_theta", config.get("rope_theta"))}
    if config.get(_PARTIAL) is not None:
        found[_PARTIAL] = config[_PARTIAL]
    if isinstance(kind, str) and _ORIGINAL in KINDS.get(kind, {}):
        original = (
            config.get(_ORIGINAL) or found.get(_ORIGINAL) or config.get("max_position_embeddings")
        )
        found |= {} if original is None else {_ORIGINAL: original}
    return found


def problems(config: Mapping[str, Any], kinds: tuple[str, ...], partial: bool) -> Iterator[str]:
    """What of a ``config.json`` is not built for a family with these ``kinds``, one text for each;
    ``partial``: it may rotate a part of each head."""
    given, (old, new) = (
        _given(config),
        (config.get(form) or {} for form in ("rope_scaling", "rope_parameters")),
    )
    kind = given["rope_type"]
    if old and new and old != new:
        yield (
            "rope_scaling and rope_parameters differ, of which transformers reads the first "
            "alone: keep one of them"
        )
        return
    if (old or new).get("type") not in (None, kind):
        yield (
            f"rotary settings have rope_type {kind!r} and type {(old or new)['type']!r}: keep "
            "one of them"
        )
        return
    for name in (_ORIGINAL, _PARTIAL):
        if (
            len({value for value in (config.get(name), (old or new).get(name)) if is_number(value)})
            > 1
        ):
            yield (
                f"{name} differs in the rotary settings and beside them, where transformers "
                "reads it: keep one"
            )
    if nested := sorted(name for name, value in given.items() if isinstance(value, Mapping)):
        yield (
            f"rotary settings of their own for some layers ({', '.join(nested)}) are not built: "
            "all have the same"
        )
        return
    if kind not in kinds:
        why = f": {_REFUSED[kind]}" if isinstance(kind, str) and kind in _REFUSED else ""
        yield f"rope_type must be one of {', '.join(kinds)}, got {kind!r}{why}"
        return
    known = {
        "rope_type": Kind("", lambda _: True),
        "rope_theta": _BASE,
        _PARTIAL: _SHARE,
        **KINDS[kind],
    }
    if unknown := sorted(given.keys() - known.keys()):
        read = ", ".join(sorted(known.keys() - (set() if partial else {_PARTIAL})))
        if {"rope_type", "type"} & (old or new).keys():
            yield (
                f"rotary settings of rope_type {kind} are {read}, got {', '.join(unknown)}: "
                "transformers and vLLM do not read others alike; mend the name, or remove them "
                "from config.json"
            )
        else:
            yield (
                f"rotary settings with {', '.join(unknown)} need a rope_type: "
                f"{', '.join(kinds[1:])}"
            )
    if missing := sorted(_NEEDED[kind].keys() - given.keys()):
        yield f"rope_type {kind} needs {', '.join(missing)}"
    wrong = [
        f"{name} must be {known[name].words}, got {value!r}"
        for name, value in given.items()
        if name in known and not known[name].holds(value)
    ]
    yield from wrong
    if not (wrong or missing):
        yield from _of_values(config, given, partial)


def _of_values(config: Mapping[str, Any], given: Settings, partial: bool) -> Iterator[str]:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = given.get(_PARTIAL, 1)
    rotated = int(head * share)
    if share != 1 and not partial:
        yield f"{_PARTIAL} must be 1, got {share}"
    elif rotated % 2 or not rotated:
        yield f"{_PARTIAL} must leave an even part of a head of {head} to be rotated, got {share}"
    for name in ("short_factor", "long_factor"):
        if name in given and len(given[name]) != rotated // 2:
            yield (
                f"{name} must have an entry for each of {rotated // 2} frequencies, got "
                f"{len(given[name])}"
            )
    if given["rope_type"] == "yarn" and given.get("beta_fast", 32) < given.get("beta_slow", 1):
        yield (
            f"beta_fast must be at least beta_slow, got {given.get('beta_fast', 32)} and "
            f"{given.get('beta_slow', 1)}"
        )
    if given["rope_type"] == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        yield f"high_freq_factor must be above low_freq_factor, got {high} and {low}"


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a ``config.json`` without ``problems``."""
    found = _given(config)
    found["rope_theta"] = float(found["rope_theta"])
    if found.get(_PARTIAL) == 1:
        del found[_PARTIAL]
    if found["rope_type"] == "longrope" and "factor" not in found:
        found["factor"] = (config.get("max_position_embeddings") or found[_ORIGINAL]) / found[
            _ORIGINAL
        ]
    return found


def window_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence; None: it is not said. Also of a model that no family has."""
    given, declared = _given(config), config.get("max_position_embeddings") or None
    stretched = {"yarn": given.get(_ORIGINAL), "linear": declared}.get(given["rope_type"])
    return (
        declared if stretched is None or "factor" not in given else int(stretched * given["factor"])
    )


def rotary(settings: Settings, head_dim: int, longest: int | None) -> tuple[Tensor, float]:
    """fp32 (rotated dimensions / 2,) frequencies, on the CPU, and what cosines and sines are
    multiplied by.
    ``longest``: tokens of the longest sequence of the run, by which longrope chooses its factors,
    as vLLM does by ``max_model_len``; transformers looks at each batch."""
    import torch

    if settings["rope_type"] == "default":
        dim = int(head_dim * settings.get(_PARTIAL, 1.0))
        powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / settings["rope_theta"] ** powers, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=dict(settings),
        head_dim=head_dim,
        standardize_rope_params=lambda: None,
        # of which they divide one by the other although there is head_dim
        hidden_size=head_dim,
        num_attention_heads=1,
    )
    return ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"), seq_len=longest)


def attention_factor(settings: Settings) -> float:
    return rotary(settings, 2, None)[1]


def chosen_factors(settings: Settings, longest: int) -> str | None:
    """Which of longrope's factors hold for all sequences of a run, as a line for its log."""
    if settings["rope_type"] != "longrope":
        return None
    original = settings[_ORIGINAL]
    return (
        f"positions: longrope's {'long' if longest > original else 'short'} factors, for all "
        f"sequences, which have up to {longest} tokens (original window: {original})"
    )


def engine_overrides(settings: Settings) -> dict[str, Any]:
    """``hf_overrides`` with which vLLM takes a yarn's whole window, of which it knows
    ``max_position_embeddings`` only (vllm 0.32.0 config/model.py:2595), and multiplies cosines and
    sines of longrope as transformers does: it has a factor for short and one for long sequences
    (model_executor/layers/rotary_embedding/__init__.py:318)."""
    if settings["rope_type"] == "yarn":
        return {
            "rope_parameters": settings,
            "max_position_embeddings": int(settings[_ORIGINAL] * settings["factor"]),
        }
    if settings["rope_type"] == "longrope":
        factors = dict.fromkeys(("short_mscale", "long_mscale"), attention_factor(settings))
        return {"rope_parameters": {**settings, **factors}}
    return {}
