"""What the policy needs to know of a Hugging Face checkpoint, read from its ``config.json``
alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import (
    FLAG,
    MAP,
    NUMBER,
    TEXT,
    InputError,
    Kind,
    check,
    is_integer,
    list_of,
    or_null,
    read_json,
    similar_path,
)
from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.families import family_of
from openrlhf_ext.megatron.mlps import MLP
from openrlhf_ext.megatron.model import positions
from openrlhf_ext.megatron.model.family import Family
from openrlhf_ext.megatron.model.folder import require_one_model

__all__ = ["ModelShape", "read_config", "read_model_shape", "read_value_scale", "read_value_shape"]


_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None  # None: config.json does not say
    rms_norm_eps: float
    rope_theta: float
    # Llama 3 scaling; None: another one, or plain rotary embedding
    rope_scaling_factor: float | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    # of a critic or reward model: HF name, in the place of the vocabulary projection
    value_head: str | None = None
    # not of the decoder, but of low-rank adapters of these modules of it (``adapter_shape``); 0: of
    # the decoder
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    # of a mixture, whose ``ffn_hidden_size`` is that of an expert (``mlps.moe``)
    num_experts: int = 0
    experts_per_token: int = 0
    renormalizes: bool = False
    shared_ffn_hidden_size: int = 0
    # by which embeddings, scores, what each branch of a layer adds, and logits (divided) differ
    # from the usual ones
    embedding_factor: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    residual_factor: float = 1.0
    logits_divisor: float = 1.0
    layers_without_rope: tuple[int, ...] = ()
    # JSON of rotary settings besides the two above (``positions.Settings``)
    rope: str | None = None
    # of attention, tokens: longer sequences are not computed (``config.model_rules``)
    window: int | None = None
    # of gated delta nets (``attentions.delta_net``): heads, entries of a head, and width of the
    # convolution
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_conv_width: int = 0
    # the kind of each layer's attention (``Attention.layer_type``); empty: the family has one kind
    layer_types: tuple[str, ...] = ()

    @property
    def is_mixture(self) -> bool:
        """Whether tokens choose among several MLPs of a layer."""
        return self.num_experts > 0

    @property
    def keeps_states(self) -> bool:
        """Whether engines keep a state of each request beside keys and values."""
        return any(kind.request_bytes(1, 1) for kind in self.attention_counts)

    @property
    def family(self) -> Family:
        return family_of(self.model_type)

    @cached_property
    def rotary(self) -> positions.Settings:
        if self.rope is not None:
            return json.loads(self.rope)
        scaled = (
            {}
            if self.rope_scaling_factor is None
            else {**_LLAMA3, "factor": self.rope_scaling_factor}
        )
        return {"rope_type": "default", "rope_theta": self.rope_theta, **scaled}

    @property
    def rotary_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return positions.attention_factor(self.rotary)

    @property
    def rotary_width(self) -> int:
        """Entries of a head that the rotary embedding turns."""
        return int(self.head_dim * self.rotary.get("partial_rotary_factor", 1))

    @cached_property
    def mlp(self) -> MLP:
        """The MLP of each layer."""
        return self._part(self.family.mlp)

    @cached_property
    def kinds(self) -> dict[str, Attention]:
        """The attention of each type of layer that the family has."""
        return {kind.layer_type: self._part(kind) for kind in self.family.attentions}

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer."""
        types = self.layer_types or tuple(self.kinds) * self.num_layers
        return tuple(self.kinds[layer_type] for layer_type in types)

    @cached_property
    def attention_counts(self) -> dict[Attention, int]:
        """How many layers have which attention."""
        return Counter(self.attentions)

    def _part(self, kind: type[Any]) -> Any:
        """A part of a layer, which takes its fields from those of the same names."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Entries of each dimension that a ``Rule`` names."""
        found = {
            "one": 1,
            "hidden": self.hidden_size,
            "vocab": self.vocab_size,
            "adapter": self.adapter_rank,
            **self.mlp.sizes,
        }
        for attention in self.attention_counts:
            found |= attention.sizes
        return found

    def of_layers(self, count: Callable[[Attention], int]) -> int:
        """The sum over all layers of what ``count`` says of their attention."""
        return sum(number * count(kind) for kind, number in self.attention_counts.items())

    @property
    def attention_weights(self) -> float:
        """Number of weights of the mean layer's attention that each token is multiplied by."""
        return self.of_layers(lambda kind: kind.token_weights) / self.num_layers

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence at which causal attention costs as many operations as everything
        else in the layers.

        Per token and layer: 2 operations for each weight, and those that depend on no length;
        2 * 2 * (length / 2) * ``pair_width`` for scores and weighted values, half of the sequence
        being visible on average.
        """
        fixed = self.of_layers(lambda kind: kind.token_weights + kind.token_operations // 2)
        pairs = self.of_layers(lambda kind: kind.pair_width)
        return (fixed + self.num_layers * self.mlp.token_weights) / pairs if pairs else math.inf

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        return -(-self.vocab_size // tensor_parallel_size) * tensor_parallel_size


def read_model_shape(model_path: str | Path, **changes: Any) -> ModelShape:
    """Reads ``model_path/config.json`` (transformers 4 and 5 forms). Raises InputError: there is
    none, a dimension is missing, or the model type, rotary scaling, activation or bias is not
    built. ``changes``: entries that take the place of those in the file."""
    return _shape(read_config(model_path) | changes, model_path)


def read_value_shape(model_path: str | Path, value_head: str) -> ModelShape:
    """The checkpoint's decoder with a value head, as critics and reward models build it; embeddings
    have nothing to be tied to. An entry ``value_head_prefix`` of ``config.json`` wins over the
    given HF name of the head."""
    config = read_config(model_path)
    check(config, str(_config_path(model_path)), {}, {"value_head_prefix": TEXT})
    prefix = config.get("value_head_prefix", value_head)
    return replace(_shape(config, model_path), tied_embeddings=False, value_head=prefix)


def read_value_scale(model_path: str | Path) -> tuple[float, float] | None:
    """``mean`` and ``std`` of a reward model's ``config.json``, by which
    ``reward.normalize_enable`` divides; None: it has neither. Raises InputError: only one is there,
    or they are no mean and std."""
    config, path = read_config(model_path), _config_path(model_path)
    if "mean" not in config and "std" not in config:
        return None
    check(config, str(path), {"mean": NUMBER, "std": _POSITIVE})
    return float(config["mean"]), float(config["std"])


def _config_path(model_path: str | Path) -> Path:
    return Path(model_path) / "config.json"


def read_config(model_path: str | Path) -> dict[str, Any]:
    """Of a folder that holds one model. Raises InputError."""
    if Path(model_path).is_file():
        raise InputError(
            f"{model_path} is a file: give the folder that holds config.json, weights and tokenizer"
        )
    if not Path(model_path).is_dir():
        raise InputError(
            f"{model_path} does not exist (a hub name has the form "
            f"org/name){similar_path(model_path)}"
        )
    require_one_model(model_path)
    return read_json(_config_path(model_path), {"model_type": TEXT})


def _up_to(most: int) -> Kind:
    """A dimension; more than ten times that of the largest dense models is a slip, and memory is
    taken by it."""
    return Kind(
        f"an integer from 1 to {most}", lambda value: is_integer(value) and 1 <= value <= most
    )


def _required(family: Family) -> dict[str, Kind]:
    own = {entry: _up_to(most) for entry, most in family.mlp.entries.values()}
    return {
        "num_hidden_layers": _up_to(2**10),
        "hidden_size": _up_to(2**18),
        **own,
        **{
            entry: _up_to(most)
            for kind in family.attentions
            for entry, most in kind.entries.items()
        },
        "vocab_size": _up_to(2**22),
        "rms_norm_eps": NUMBER,
        "rope_theta": NUMBER,
        "tie_word_embeddings": FLAG,
        **{entry: FLAG for entry in family.mlp.flags.values()},
        **{entry: _POSITIVE for entry in family.factors.values()},
    }


_POSITIVE = Kind("a number above 0", lambda value: NUMBER.holds(value) and value > 0)
_MARK = Kind("0 or 1", lambda value: value in (0, 1))
_OPTIONAL = {
    "no_rope_layers": or_null(list_of(_MARK)),
    "num_key_value_heads": or_null(_up_to(2**12)),
    "layer_types": or_null(list_of(TEXT)),
    "head_dim": or_null(_up_to(2**12)),
    "max_position_embeddings": or_null(_up_to(2**31)),
    "rope_parameters": or_null(MAP),
    "rope_scaling": or_null(MAP),
}


def _shape(own_config: dict[str, Any], model_path: str | Path) -> ModelShape:
    path = _config_path(model_path)
    try:
        family = family_of(own_config["model_type"], model_path)
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    config = check(family.usual(own_config), str(path), _required(family), _OPTIONAL)
    if problems := [*family.problems(config)]:
        raise InputError(f"{path}: " + "; ".join(problems))
    rope = positions.settings_of(config)
    # what was read before there were other kinds keeps its form, which checkpoints hold
    usual = rope["rope_type"] == "llama3" and rope.items() >= _LLAMA3.items()
    is_told = usual or rope.keys() == {"rope_type", "rope_theta"}
    factors: dict[str, Any] = {
        field: float(config[entry]) for field, entry in family.factors.items()
    }
    for kind in family.attentions:
        factors |= kind.read(config)
    return ModelShape(
        model_type=family.model_type,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        **{field: config[entry] for field, (entry, _) in family.mlp.entries.items()},
        **{field: config[entry] for field, entry in family.mlp.flags.items()},
        vocab_size=config["vocab_size"],
        max_positions=positions.window_of(config),
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling_factor=float(rope["factor"]) if usual else None,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        **factors,
        layers_without_rope=family.without_rope(config),
        rope=None if is_told else json.dumps(rope, sort_keys=True),
        window=family.window(config),
        layer_types=family.layer_types(config),
    )
