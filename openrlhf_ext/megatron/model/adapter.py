"""Low-rank adapters as peft describes them: ``adapter_config.json``, names of modules."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import (
    NUMBER,
    TEXT,
    InputError,
    Kind,
    check,
    is_integer,
    list_of,
    read_json,
)
from openrlhf_ext.megatron.model.family import Family, Rule
from openrlhf_ext.options.sections.models import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
_RANK = Kind("an integer above 0", lambda value: is_integer(value) and value > 0)
# what a peft adapter may have besides, with the values at which it is a plain one
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False, None), "use_rslora": (False, None),
    "fan_in_fan_out": (False, None), "modules_to_save": (None, []), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "layers_to_transform": (None,), "target_parameters": (None, []),
    "trainable_token_indices": (None,), "lora_bias": (False, None),
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """What peft's ``LoraConfig`` calls r, lora_alpha, lora_dropout and target_modules, these by
    name."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def options(self) -> dict[str, Any]:
        """What has to be the same for adapters to be trained on, by the names of the options."""
        return {
            "ds.lora.rank": self.rank,
            "ds.lora.alpha": self.alpha,
            "ds.lora.target_modules": list(self.targets),
        }

    def config(self, base: str) -> dict[str, Any]:
        """Entries of ``adapter_config.json``, from which peft and vLLM load an adapter of the
        checkpoint ``base``."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        }


def module_name(hf_name: str) -> str:
    """What peft calls the module of a weight: ``q_proj``."""
    return hf_name.split(".")[-2]


def linear_modules(family: Family) -> tuple[str, ...]:
    """Those that peft's ``all-linear`` means: every linear of a decoder layer; of a mixture of
    experts, whose adapters no engine computes, attention's."""
    return _modules(
        rule
        for rule in family.all_layer_rules
        if rule.is_matrix
        and not rule.parameter.endswith(_without(family))
        and (".self_attention." in rule.parameter or not family.mlp.is_mixture)
    )


def _without(family: Family) -> tuple[str, ...]:
    return tuple(name for kind in family.attentions for name in kind.without_adapters)


def _modules(rules: Iterable[Rule]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(module_name(name) for rule in rules for name in rule.hf_names))


def resolved_targets(targets: str | Collection[str], family: Family) -> tuple[str, ...]:
    """The names that ``target_modules`` means, in the model's order. Raises InputError: the model
    has no such ones."""
    known = linear_modules(family)
    asked = {targets} if isinstance(targets, str) else set(targets)
    if asked == {ALL_LINEAR}:
        return known
    if not asked or (unknown := sorted(asked - set(known))):
        found = "none" if not asked else ", ".join(unknown)
        why = "; adapters of a mixture's experts are not built" if family.mlp.is_mixture else ""
        cut_otherwise = _modules(
            rule for rule in family.all_layer_rules if rule.parameter.endswith(_without(family))
        )
        if named := [name for name in cut_otherwise if name in asked]:
            why += (
                f"; adapters of {', '.join(named)} are not built, which are one projection here "
                f"and are cut part by part ({ALL_LINEAR} means the others)"
            )
        raise InputError(
            f"target modules must be {ALL_LINEAR} or some of {', '.join(known)}, got {found}{why}"
        )
    return tuple(name for name in known if name in asked)


def chosen_adapter(lora: Lora, family: Family) -> Adapter:
    """What ``ds.lora.*`` ask for. Raises InputError: modules that the model lacks, another adapter
    than the options say."""
    asked = None
    if lora.rank:
        asked = Adapter(
            lora.rank, lora.alpha, lora.dropout, resolved_targets(lora.target_modules, family)
        )
    if lora.path is None:
        assert asked is not None, "adapters are asked for"
        return asked
    found = replace(read_adapter(lora.path, family), dropout=lora.dropout)
    if asked is not None and asked != found:
        raise InputError(
            f"the adapter in {lora.path} has rank {found.rank}, alpha {found.alpha:g} and modules "
            f"{', '.join(found.targets)}, the options say {asked.rank}, {asked.alpha:g} and "
            f"{', '.join(asked.targets)}: leave ds.lora.rank, alpha and target_modules out, they "
            "are the adapter's"
        )
    return found


def read_adapter(path: str | Path, family: Family) -> Adapter:
    """Of a peft checkpoint. Raises InputError: it is none, or is more than a plain LoRA adapter of
    linear modules."""
    path = Path(path)
    if not path.is_dir():
        raise InputError(
            f"{path} is no folder: give one with {CONFIG} and {WEIGHTS}, as peft writes it"
        )
    entries = read_json(path / CONFIG)
    targets = TEXT if isinstance(entries.get("target_modules"), str) else list_of(TEXT)
    check(
        entries,
        str(path / CONFIG),
        {"r": _RANK, "lora_alpha": NUMBER, "target_modules": targets},
        {"lora_dropout": NUMBER},
    )
    if more := [
        f"{name} {json.dumps(entries[name])}"
        for name, plain in _PLAIN.items()
        if name in entries and entries[name] not in plain
    ]:
        raise InputError(
            f"{path / CONFIG}: only plain LoRA adapters are built, this one has {', '.join(more)}"
        )
    try:
        named = entries["target_modules"]
        # peft may list every module by its path; whether all layers have it, the tensors show
        names = resolved_targets(
            named if isinstance(named, str) else {n.split(".")[-1] for n in named}, family
        )
    except InputError as error:
        raise InputError(f"{path / CONFIG}: {error}") from error
    return Adapter(
        entries["r"], entries["lora_alpha"], float(entries.get("lora_dropout", 0.0)), names
    )


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a peft adapter and no whole checkpoint."""
    folder = Path(folder)
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(adapter: str | Path) -> str:
    """The folder of the checkpoint that an adapter belongs to, as it says. Raises InputError: it is
    not here."""
    base = read_json(Path(adapter) / CONFIG, {"base_model_name_or_path": TEXT})[
        "base_model_name_or_path"
    ]
    if not Path(base).is_dir():
        remedy = (
            f"openrlhf-ext convert --merge {adapter} --base FOLDER --to WHOLE makes a checkpoint "
            "that needs none"
        )
        raise InputError(f"the base of {adapter} is {base}, which is no folder here: {remedy}")
    return base
