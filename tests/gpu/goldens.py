"""Three steps of a seeded model on a CPU, in fp32, in a folder that travels:
``python -m tests.gpu.goldens FOLDER``.

The model itself (1 MB) is in the folder too, so that no other torch has to draw the same random
numbers.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf_ext.imports import without_collection

FOLDER = "goldens"
"""Its name in a bundle."""
_STEPS = 3


@dataclass(frozen=True)
class Goldens:
    """What three steps gave.

    Attributes:
        logprobs_SN: (steps, response tokens) fp32, before each step.
        losses, grad_norms: of each step.
        torch: version that computed them.
    """

    logprobs_SN: Tensor
    losses: list[float]
    grad_norms: list[float]
    torch: str

    def save(self, folder: Path) -> None:
        numbers = {"losses": self.losses, "grad_norms": self.grad_norms, "torch": self.torch}
        save_file({"logprobs_SN": self.logprobs_SN.contiguous()}, folder / "goldens.safetensors")
        (folder / "goldens.json").write_text(json.dumps(numbers, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Goldens:
        numbers = json.loads((folder / "goldens.json").read_text())
        return cls(load_file(folder / "goldens.safetensors")["logprobs_SN"], **numbers)


def make(folder: Path) -> None:
    """Model and goldens.

    Raises:
        RuntimeError: there is a GPU to be seen: they are to be a CPU's.
    """
    with without_collection():
        from tests.models import make_tiny_model

    if torch.cuda.is_available():
        raise RuntimeError("goldens are made on a CPU: set CUDA_VISIBLE_DEVICES to nothing")
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model")
    three_steps_of(folder)[0].save(folder)


def three_steps_of(folder: Path):
    """(goldens, policy): three optimizer steps on this process's device, of the model in the
    folder."""
    with without_collection():
        from tests.gpu.alone import build
        from tests.megatron.parity import WeightedLogprob
        from tests.megatron.reference import TEMPERATURE, make_batch

    batch, weights_N = make_batch(61)
    shaped = WeightedLogprob(weights_N, batch.responses)
    policy = build({"model": str(folder / "model"), "dtype": "fp32", "temperature": TEMPERATURE})
    logprobs, steps = [], []
    for _ in range(_STEPS):
        logprobs.append(policy.logprobs(batch).logprobs_N)
        steps.append(policy.train_step(batch, shaped, shaped))
    losses, norms = ([step[name] for step in steps] for name in ("loss/policy", "grad_norm"))
    return Goldens(torch.stack(logprobs), losses, norms, torch.__version__), policy


if __name__ == "__main__":
    from openrlhf_ext import patches

    patches.apply()
    make(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's own clean-up
