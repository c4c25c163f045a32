"""Nothing unused: vulture over everything that users run. Code that only tests call counts as
unused."""

from __future__ import annotations

import ast
from pathlib import Path

import vulture

ROOT = Path(__file__).parent.parent
SCANNED = ("openrlhf_ext", "patches", "benchmarks", "examples")
REGISTERED = ["@register_algorithm", "@model_validator", "@fault"]
OPTIONS = (
    "openrlhf_ext/options/sections/",
    "openrlhf_ext/config/run_config.py",
    "openrlhf_ext/config/sft.py",
)
"""Fields there are options: some are read by OpenRLHF's classes only, others are refused by
name."""

LIBRARIES_READ = {
    # overridden: the library calls it
    "_check_value": "argparse, of a parser",
    "_communicate": "Megatron's schedules, of P2PCommunicator",
    "_postprocess": "Megatron's GPTModel.forward",
    "moe_layer_recompute": "Megatron's MoELayer.forward",
    "get_replay_topk": "Megatron's topk_routing_with_score_function, of a router's replay",
    "opaque_attention_op": "vLLM's attention layers, of their platform",
    "skip_clone": "vLLM's SamplingParams.clone",
    "point": "Megatron's token dispatcher, of its copies to the host",
    "_maybe_dtoh_and_synchronize": "Megatron's token dispatcher, of itself",
    "cuda_dtoh_stream": "Megatron's token dispatcher, of its class",
    "_forward_impl": "Megatron's ColumnParallelLinear.forward and RowParallelLinear.forward",
    "_apply_head": "vLLM's LogitsProcessor.forward",
    "rotary_pos_emb": "Megatron's TransformerLayer.forward, which gives it",
    "source_to_code": "importlib, of a loader",
    "on_train_begin": "transformers' Trainer, of a callback",
    "control": "transformers' Trainer, of a callback",
    "on_pre_optimizer_step": "transformers' Trainer, of a callback",
    "on_optimizer_step": "transformers' Trainer, of a callback",
    "set_activation_dtype": "TransformerEngine's modules, of themselves",
    "activation_dtype": "TransformerEngine's modules, of themselves",
    "_load_adapter": "vLLM's LoRA manager, of itself",
    "_expand_kernel_impl": "vLLM's CPU platform, which registers it for a kernel of Triton's",
    "spec_token_ids": "vLLM's scheduler, of a request",
    "query_start_loc_np": "vLLM's connector of auxiliary outputs, of a step",
    "aux_output_connector_output": "vLLM's scheduler, of a step's output",
    "num_computed_tokens_np": "vLLM's connector of auxiliary outputs, of a step",
    "l2_norm_impl": "Megatron's clip_grads, of itself",
    "multi_tensor_scale_impl": "Megatron's clip_grads, of itself",
    "tensor_model_parallel": "Megatron's gradient norm, of a parameter",
    "partition_dim": "Megatron's marks of a parameter that is cut",
    "partition_stride": "Megatron's marks of a parameter that is cut",
    "return_layernorm_output": "TransformerEngine's LayerNormLinear",
    "return_layernorm_output_gathered": "TransformerEngine's LayerNormLinear",
    "padding_idx": "torch.nn.Embedding.forward",
    "on_step_end": "transformers' Trainer, of a callback",
    "from_config_dict_json": "vLLM's get_quant_config, of a quantization",
    # set: the library reads it
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": "Megatron's distributed optimizer, of the configuration",
    "self_attn_bda": "Megatron's TransformerLayer.forward, of itself",
    "mlp_bda": "Megatron's TransformerLayer.forward, of itself",
    "_yarn_concentration_factor": "Megatron's attention, of itself",
    "grad_scale_func": "Megatron's schedules, of the configuration",
    "no_sync_func": "Megatron's schedules, of the configuration",
    "use_cpu_initialization": "Megatron's layers, of the configuration",
    "_mm_pad_token_ids": "OpenRLHF's engine actor",
    "output_kind": "vLLM, of its SamplingParams",
    "make_scheduler": "vLLM, by the name in rollout/scheduler.py's QUALIFIED_NAME",
    "cu_seqlens_kv": "TransformerEngine's attention, of a pack",
    "yaml_implicit_resolvers": "PyYAML, of a loader",
    "rootRank": "torch's ProcessGroup, of BroadcastOptions",
    "rootTensor": "torch's ProcessGroup, of BroadcastOptions",
    "_timeout": "torch's ProcessGroup, of its options",
    "_devices": "torch's ProcessGroupGloo, of its options",
    "pre_tokenizer": "tokenizers, of a Tokenizer",
    # of the bases of agent files for earlier releases (rewards/earlier_agents.py): the file reads
    # it
    "model_name": "OpenRLHF's OpenAI server executor",
    "client": "see model_name",
    # found by a name that is put together
    "reference_logprobs": "the driver's Scorer: '<model>_logprobs'",
}
"""Each exception with who reads it."""


def texts(path: Path) -> set[str]:
    """What a file says as text: ranks and engines are called by name, through Ray or a process
    group."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def unused() -> dict[str, str]:
    """Names that nothing uses, with where they are."""
    checker = vulture.Vulture(ignore_decorators=REGISTERED)
    files = [
        path
        for folder in SCANNED
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_symlink()
    ]
    checker.scavenge([str(path) for path in files])
    said = set().union(*map(texts, files))
    found = {}
    for item in checker.get_unused_code(min_confidence=60):
        place = Path(item.filename).relative_to(ROOT).as_posix()
        is_option = item.typ == "variable" and place.startswith(OPTIONS)
        if item.name not in said and not is_option:
            found[item.name] = f"{place}:{item.first_lineno}"
    return found


def test_nothing_is_unused() -> None:
    found = unused()
    new = {name: place for name, place in found.items() if name not in LIBRARIES_READ}
    assert not new, "delete it, or say in LIBRARIES_READ who reads it"
    assert not LIBRARIES_READ.keys() - found.keys(), "exceptions that are not needed any more"
