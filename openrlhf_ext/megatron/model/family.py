"""What a model family declares: its names in the checkpoint, how its ``config.json`` is read, what
it refuses. Needs no torch. What Megatron builds is the same for all but for the kinds of attention
(``megatron.attentions``) and of MLP (``megatron.mlps``): a decoder with RMS norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from openrlhf_ext.inputs import is_integer
from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.attentions.full import FullAttention
from openrlhf_ext.megatron.mlps import MLP
from openrlhf_ext.megatron.mlps.dense import DenseMLP
from openrlhf_ext.megatron.model import positions

Split = Literal["replicated", "row", "vocab", "qkv", "gated_qkv", "parts"]
Size = str
"""What a dimension counts: 'one', or entries of the 'hidden' state, the 'vocab', the rank of an
'adapter', or what a kind of attention or MLP names (``ModelShape.sizes``)."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of.

    ``split``: 'replicated' is whole on every tensor-parallel rank, 'row' cuts dimension 1, 'vocab'
    cuts dimension 0 after padding, 'qkv' interleaves query, key and value per group and cuts
    dimension 0 (a rank may get part of a
    group: with fewer key-value heads than ranks Megatron gathers the projections), 'gated_qkv' does
    so with queries, gates, key and value, where the first tensor has each head's query, then its
    gate; 'parts' cuts every part (gate and up) by itself and stacks the pieces. Tensors may hold
    several parts, stacked: part i is in tensor ``tensors[i]``; where that is empty, each part is a
    tensor, or all are in the only one. 'replicated' stacks its tensors. ``rows`` are those of each
    part, ``columns`` the other dimension, or dimensions, None of a vector. A part whose name is
    empty has no tensor, and is zero.
    ``expert``: whose parameter it is, None: not an expert's; experts are dealt over ranks of their
    own, and 'parts' and 'row' cut theirs over ranks of their own.
    """

    parameter: str
    hf_names: tuple[str, ...]
    split: Split
    rows: tuple[Size, ...]
    columns: Size | tuple[Size, ...] | None = None
    tensors: tuple[int, ...] = ()
    expert: int | None = None

    @property
    def is_matrix(self) -> bool:
        return isinstance(self.columns, str)

    @property
    def places(self) -> tuple[int, ...]:
        """In which tensor each part is."""
        if self.tensors:
            return self.tensors
        return tuple(range(len(self.rows))) if len(self.hf_names) > 1 else (0,) * len(self.rows)

    @property
    def is_of_experts(self) -> bool:
        """Whether the rule stands for one of every expert (``at_expert``)."""
        return "{expert}" in self.parameter

    def at_expert(self, local: int, expert: int) -> Rule:
        """The rule of one expert: ``local`` in Megatron's names, those of a rank, ``expert`` in the
        checkpoint's."""
        names = tuple(name.replace("{expert}", str(expert)) for name in self.hf_names)
        parameter = self.parameter.replace("{expert}", str(local))
        return replace(self, parameter=parameter, hf_names=names, expert=expert)

    def at_layer(self, local: int, layer: int) -> Rule:
        """The rule of one layer: ``local`` in Megatron's names, ``layer`` in those of the
        checkpoint."""
        names = tuple(name.replace("{layer}", str(layer)) for name in self.hf_names)
        return replace(
            self, parameter=self.parameter.replace("{layer}", str(local)), hf_names=names
        )

    @property
    def axis(self) -> int:
        return 1 if self.split == "row" else 0


# what most families call the tensors of a layer
ATTENTION = FullAttention.names
LAYER = {**ATTENTION, **DenseMLP.names}
QKV_BIAS = {"self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv")}
QK_NORM = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}

_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_REFUSED = {
    "quantization_config": "only fp32, bf16 and fp16 weights are loaded",
    "dual_chunk_attention_config": "vLLM attends in chunks then, transformers does not: remove it from config.json",
    "logit_scale": "vLLM multiplies logits by it, transformers does not: remove it from config.json",
}
_REQUIRED = {"is_causal": "attention sees no later tokens here"}
NO_BIAS = "projections of this family have no bias here"
ALWAYS_BIAS = "query, key and value of this family have a bias here"
_SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of decoders.

    ``attentions``: the kinds of its layers' attention (``megatron.attentions``); ``mlp``: the kind
    of their MLPs (``megatron.mlps``); ``layer``: parameters of a decoder layer -> HF tensors that
    they are made of, both named within the layer, in the order in which they are exported; of a
    layer of another kind they are left out. A bias of the query-key-value projection and norms of
    query and key are built if, and only if, they are named here.
    ``config_names``: entries of ``config.json`` that this family calls otherwise: usual name -> its
    name;
    ``config_defaults``: those that it may leave out; ``refused``: those that have to be absent,
    null, false or empty -> why, or what to do; ``required``: those that have to be absent or true
    -> why; ``factors``: fields of ``ModelShape`` -> the positive numbers that they are read from.
    ``window_switch``: ``sliding_window`` holds only where ``use_sliding_window`` is true;
    ``skips_rope``: layers whose entry in ``no_rope_layers`` is 0 have no rotary embedding, or every
    ``no_rope_layer_interval``-th if that is null; ``rope_types``: kinds of rotary embedding;
    ``rope_ignored``: rotary settings that change nothing here;
    ``rotates_part``: ``partial_rotary_factor`` may be below 1; ``zero_centered``: norms multiply by
    1 + weight.
    """

    model_type: str  # of ``config.json``
    critic_class: str  # of transformers, which reads an exported critic
    attentions: tuple[type[Attention], ...] = (FullAttention,)
    mlp: type[MLP] = DenseMLP
    layer: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LAYER)
    layer_prefix: str = "model.layers.{layer}."  # stands before an HF name within a layer
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    output: str = "lm_head.weight"
    config_names: Mapping[str, str] = field(default_factory=dict)
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_types: tuple[str, ...] = tuple(positions.KINDS)
    refused: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, str] = field(default_factory=dict)
    window_switch: bool = False
    skips_rope: bool = False
    rope_ignored: tuple[str, ...] = ()
    rotates_part: bool = False
    zero_centered: bool = False

    def __post_init__(self) -> None:
        known: dict[str, tuple[Any, ...]] = {}
        for kind in self.attentions:
            known |= self.parameters(kind)
        if unknown := sorted(self.layer.keys() - known.keys()):
            raise ValueError(
                f"{self.model_type}: a decoder layer has no {unknown}, only {sorted(known)}"
            )
        splits = get_args(Split)
        if others := sorted({split for split, *_ in known.values()}.difference(splits)):
            raise ValueError(
                f"{self.model_type}: parameters are split by {', '.join(splits)}, not by "
                f"{', '.join(others)}"
            )

    def parameters(self, attention: type[Attention]) -> dict[str, tuple[Any, ...]]:
        """Those that a decoder layer with this kind of attention may have, in the order in which
        Megatron builds them."""
        return {**attention.parameters, **self.mlp.parameters}

    # ---- names

    @property
    def qkv_bias(self) -> bool:
        return "self_attention.linear_qkv.bias" in self.layer

    @property
    def qk_norm(self) -> bool:
        return "self_attention.q_layernorm.weight" in self.layer

    def layer_rules(self, attention: type[Attention]) -> list[Rule]:
        """Rules of a decoder layer with this kind of attention; ``{layer}`` stands for its index
        (see ``Rule.at_layer``)."""
        cuts = self.parameters(attention)
        return [
            Rule(
                f"decoder.layers.{{layer}}.{parameter}",
                tuple(self.layer_prefix + name for name in tensors),
                *cuts[parameter],
            )
            for parameter, tensors in self.layer.items()
            if parameter in cuts
        ]

    @property
    def all_layer_rules(self) -> list[Rule]:
        """Those of layers of every kind, each once."""
        rules = [rule for kind in self.attentions for rule in self.layer_rules(kind)]
        return list(dict.fromkeys(rules))

    @property
    def embedding_rule(self) -> Rule:
        return Rule(
            "embedding.word_embeddings.weight", (self.embedding,), "vocab", ("vocab",), "hidden"
        )

    @property
    def final_norm_rule(self) -> Rule:
        return Rule("decoder.final_layernorm.weight", (self.final_norm,), "replicated", ("hidden",))

    @property
    def output_rule(self) -> Rule:
        return Rule("output_layer.weight", (self.output,), "vocab", ("vocab",), "hidden")

    # ---- config.json

    def usual(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of ``config.json`` under their usual names, with those that were left out."""
        renamed = {usual: config[own] for usual, own in self.config_names.items() if own in config}
        for form in ("rope_scaling", "rope_parameters"):
            if self.rope_ignored and isinstance(rope := config.get(form), Mapping):
                kept = {name: rope[name] for name in rope if name not in self.rope_ignored}
                renamed[form] = kept
        return {**_DEFAULTS, **self.config_defaults, **config, **renamed}

    def problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        """What of a ``config.json`` (``usual``) is not built, one text for each."""
        yield from positions.problems(config, self.rope_types, self.rotates_part)
        for kind in self.attentions:
            yield from kind.problems(config)
        yield from self.mlp.problems(config)
        yield from self._layer_problems(config)
        for entry, why in {**_REFUSED, **self.refused}.items():
            if config.get(entry):
                yield f"{self.model_type} with {entry} = {config[entry]!r} is not supported: {why}"
        for entry, why in {**_REQUIRED, **self.required}.items():
            if entry in config and config[entry] is not True:
                yield f"{self.model_type} with {entry} = {config[entry]!r} is not supported: {why}"

    def window(self, config: Mapping[str, Any]) -> int | None:
        """How many tokens attention sees in layers with a window, the query's own among them; None:
        there are none."""
        return (
            None
            if self.window_switch and not config.get("use_sliding_window")
            else config.get("sliding_window")
        )

    def without_rope(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """The layers without rotary embedding."""
        layers = range(config["num_hidden_layers"] if self.skips_rope else 0)
        if (marks := config.get("no_rope_layers")) is not None:
            return tuple(layer for layer in layers if not marks[layer])
        return tuple(
            layer for layer in layers if (layer + 1) % config["no_rope_layer_interval"] == 0
        )

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The kind of each layer's attention, where there are several: ``layer_types``, or the
        second one in every ``full_attention_interval``-th layer, and the first one elsewhere."""
        if len(self.attentions) == 1:
            return ()
        if (given := config.get("layer_types")) is not None:
            return tuple(given)
        (usual, other), every = self.attentions, config["full_attention_interval"]
        return tuple(
            usual.layer_type if (number + 1) % every else other.layer_type
            for number in range(config["num_hidden_layers"])
        )

    def _kind_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        layers, given = config["num_hidden_layers"], config.get("layer_types")
        interval: Any = config.get("full_attention_interval")
        if given is None and not (is_integer(interval) and interval > 0):
            yield f"full_attention_interval must be an integer above 0, got {interval!r}"
        if given is not None and len(given) != layers:
            yield (
                f"layer_types must have an entry for each of the {layers} layers, got {len(given)}"
            )

    def _layer_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        kinds, window = set(config.get("layer_types") or ()), self.window(config)
        built = {kind.layer_type for kind in self.attentions}
        if len(built) > 1:
            yield from self._kind_problems(config)
        else:
            built.add(_SLIDING)  # no sequence is longer than the window
        if other := sorted(kinds - built):
            yield (
                f"layer_types must be of {sorted(built)}, others are not built, got "
                f"{', '.join(other)}"
            )
        if _SLIDING in kinds and window is None:
            yield (
                "layer_types with sliding_attention needs the window: sliding_window, with "
                "use_sliding_window"
            )
        if window is not None and not (is_integer(window) and window > 0):
            yield f"sliding_window must be null or an integer above 0, got {window!r}"
        marks, layers = config.get("no_rope_layers"), config["num_hidden_layers"]
        if not self.skips_rope:
            return
        if marks is not None and len(marks) < layers:
            yield (
                f"no_rope_layers must be null or a 0 or 1 for each of the {layers} layers, got "
                f"{marks!r}"
            )
        interval = config["no_rope_layer_interval"]
        if marks is None and not (is_integer(interval) and interval > 0):
            yield f"no_rope_layer_interval must be an integer above 0, got {interval!r}"
