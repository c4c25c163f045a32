"""Rules about drafts (``vllm.speculative``), and what is read of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.config.files import parameter_count
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.inputs import INTEGER, MAP, InputError, check, or_null
from openrlhf_ext.megatron.model.shape import ModelShape, read_config
from openrlhf_ext.options import Violation, value_text

METHOD, PATH = "vllm.speculative.method", "vllm.speculative.path"
_TOLD = ("granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose class in vLLM tells a head the hidden states of layers (vllm 0.32.0:
``SupportsEagle3``)."""


@dataclass(frozen=True)
class Head:
    """An EAGLE-3 head.

    Attributes:
        hidden_size, vocab_size: of the model that it drafts for.
        heads: of its attention.
        parameters: entries of its weights.
        whole: of these, what each GPU of an engine has; the rest is cut.
        cached: entries of a token's keys and values.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    parameters: int
    whole: int
    cached: int


_SIZE = or_null(INTEGER)


def read_head(folder: str) -> Head:
    """Reads config.json and the headers of the weights. Raises InputError: a file is missing or
    cannot be read."""
    path = Path(folder) / "config.json"
    config = read_config(folder)
    check(config, str(path), {}, {"transformer_layer_config": MAP})
    # the form of vLLM's own collection of heads ("speculators") has the layer's entries inside
    layer = config.get("transformer_layer_config", config)
    sizes = ("hidden_size", "vocab_size", "num_attention_heads")
    optional = dict.fromkeys(("num_key_value_heads", "head_dim", "target_hidden_size"), _SIZE)
    check(layer, str(path), dict.fromkeys(sizes, INTEGER), optional)
    if (parameters := parameter_count(folder)) is None:
        raise InputError(f"{folder} holds no *.safetensors file: give the folder of a whole head")
    heads, hidden = layer["num_attention_heads"], layer["hidden_size"]
    of_model = layer.get("target_hidden_size") or hidden
    width = layer.get("head_dim") or hidden // heads
    return Head(
        of_model,
        layer["vocab_size"],
        heads,
        parameters,
        3 * of_model * hidden,  # from the states of three layers
        2 * width * (layer.get("num_key_value_heads") or heads),
    )


def settings(config: RunConfig) -> Iterator[Violation]:
    """What drafts do not work with, whatever the model."""
    method = config.vllm.speculative.method
    if method == "none":
        return
    if config.replays_rollout:
        why = "experts are told of every token that was computed, also of drafts that were dropped"
        yield not_with(method, "train.routing_replay", "rollout", why)


def not_with(method: str, option: str, value: object, why: str) -> Violation:
    """Returns that drafts of this kind do not work with this value of another option."""
    return Violation(
        (METHOD, option),
        f"{METHOD} {method} does not work with {option} {value_text(value)}: {why}; leave one of "
        "them out",
    )


def of_model(config: RunConfig, model: ModelShape, option: str) -> Iterator[Violation]:
    """What drafts ask of the policy's model, and its head of both."""
    drafts = config.vllm.speculative
    if drafts.method == "none":
        return
    if model.keeps_states:
        yield Violation(
            (METHOD, option),
            f"{METHOD} must be none for the model of {option}, got {drafts.method}: a draft that is "
            "dropped would stay in the states of its gated delta nets; leave it out",
        )
    if drafts.method != "eagle3" or drafts.path is None:
        return
    if model.model_type not in _TOLD:
        yield Violation(
            (METHOD, option),
            f"{METHOD} eagle3 needs a model whose vLLM class tells a head its hidden states "
            f"({', '.join(_TOLD)}): the model of {option} is a {model.model_type}; use ngram",
        )
    try:
        head = read_head(drafts.path)
    except InputError as error:
        yield Violation((PATH,), f"{PATH}: {error}")
        return
    for name in ("hidden_size", "vocab_size"):
        own, policy = getattr(head, name), getattr(model, name)
        if own != policy:
            yield Violation(
                (PATH, option),
                f"{PATH} must be the head of a model with the {name} of {option}: got {own} and "
                f"{policy}; use a head that was trained for this model",
            )
    if head.heads % config.vllm.tensor_parallel_size:
        yield Violation(
            (PATH, "vllm.tensor_parallel_size"),
            "vllm.tensor_parallel_size must divide the attention heads of "
            f"{PATH}: got {config.vllm.tensor_parallel_size} and {head.heads}; use another number",
        )
