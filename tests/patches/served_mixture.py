"""What an engine of vLLM makes of a mixture of experts: a program, because an engine does not leave
its process.

    python -m tests.patches.served_mixture padded|twice|stock|stock_experts

Prints JSON: by load of weights, how far log-probs are from those of transformers, and how many rows
of experts differ.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from typing import Any

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
WAY = sys.argv[1] if __name__ == "__main__" else ""
from openrlhf_ext import patches  # noqa: E402
from openrlhf_ext.patches import vllm_moe  # noqa: E402

CHANGES = dict(vllm_moe._CHANGES)
if WAY != "padded":
    vllm_moe._CHANGES.clear()
patches.apply()

import torch  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from openrlhf_ext.rollout.scheduler import QUALIFIED_NAME  # noqa: E402
from tests.rollout import mixture  # noqa: E402

TELLING: dict[str, Any] = {"stock": {}, "stock_experts": {"enable_return_routed_experts": True}}
# which the kernel takes as it is: a stock reload then is no error
WIDTH = mixture.WIDTH if WAY == "padded" else 64
PROMPTS = [[2 + i * 7 % 500 for i in range(length)] for length in (3, 30, 140)]


class Reload:
    """Mixed into vLLM's worker."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]


def model_of(seed: int) -> PreTrainedModel:
    return mixture.random_model(seed, width=WIDTH)


def compare(llm: LLM, seed: int) -> tuple[float, int]:
    """Largest difference of a log-prob of a sampled token, and rows with other experts, or -1: they
    are not told."""
    model, worst, differ = model_of(seed), 0.0, 0
    sampling = SamplingParams(max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True, seed=1)
    for output in llm.generate(
        [{"prompt_token_ids": each} for each in PROMPTS], sampling, use_tqdm=False
    ):
        answer, length = output.outputs[0], len(output.prompt_token_ids)
        told = [
            at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        truth = mixture.truth(model, [*output.prompt_token_ids, *answer.token_ids])
        worst = max(worst, float((truth.logprobs_R[length - 1 :] - torch.tensor(told)).abs().max()))
        if answer.routed_experts is None:
            differ = -1
        else:
            differ += int(
                (mixture.in_order(answer.routed_experts) != truth.experts_RLK).any(-1).any(-1).sum()
            )
    return worst, differ


def change_twice() -> None:
    """After vLLM's import, and again by a module of another name, as in a worker whose extension
    has two."""
    for name in CHANGES:
        importlib.import_module(name)
    vllm_moe._CHANGES.update(CHANGES)
    vllm_moe.PATCH.apply()
    spec: Any = importlib.util.spec_from_file_location("another_name", vllm_moe.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    again.PATCH.apply()


def main() -> None:
    if WAY == "twice":
        change_twice()
    with tempfile.TemporaryDirectory() as folder:
        model_of(0).save_pretrained(folder)
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            skip_tokenizer_init=True,
            worker_extension_cls="tests.patches.served_mixture.Reload",
            scheduler_cls=QUALIFIED_NAME,
            **TELLING.get(WAY, vllm_moe.telling_experts()),
        )
        # the second time prompts are in the prefix cache
        found = [compare(llm, 0), compare(llm, 0)]
        for seed in (1, 2):
            llm.collective_rpc("load", args=(mixture.tensors(model_of(seed)),))
            llm.reset_prefix_cache()
            found.append(compare(llm, seed))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
