"""Call 4: the FP8 study, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tests.gpu.kit import Machine, Partly, TimeUp
from tests.gpu.te_build import ROOT

_TO_END_S = 20.0  # of the check's time, for the report
# of every kind of cell that needs neither vLLM nor Ray one or two, with layers as ranks of TP2, 4
# and 8 hold them
_REHEARSAL = """
kinds: [linear, layers, products]
recipes: [current]
linear: {tokens: 64, inputs: 128, outputs: 64, micro_batches: 2}
products: {tokens: 64, tensor_parallel: [1, 8], repeats: 1, columns: {qkv: [128, 256]}, rows: {down: [256, 128]}}
layers: {num_layers: 1, heads: 8, kv_heads: 2, head_dim: 16, mlp: 256, sequences: [32], tensor_parallel: [8, 4, 2],
         mlp_only: [current], variants: [recompute], repeats: 1}
"""


def fp8(machine: Machine) -> dict:
    """``examples/scripts/fp8_study.sh`` with the bundle; the next call goes on where this one
    ended. On a CPU the same command rehearses with tiny shapes and FP8 emulated, from the
    beginning.

    Raises:
        Partly: a cell failed; the others are kept.
        TimeUp: there was no time for some cells; the others are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = (
            (machine.bundle or ROOT / "build") / "fp8_study"
            if machine.on_gpu
            else Path(folder) / "out"
        )
        command = ["bash", "examples/scripts/fp8_study.sh", "--out", str(out)]
        command += ["--minutes", str((machine.seconds - _TO_END_S) / 60)]
        command += ["--bundle", str(machine.bundle)] if machine.bundle else []
        if not machine.on_gpu:
            (Path(folder) / "study.yaml").write_text(_REHEARSAL)
            command.append(str(Path(folder) / "study.yaml"))
        # prints into the check's own output
        done = subprocess.run(command, cwd=ROOT, timeout=machine.seconds)
        found = (
            json.loads((out / "study.json").read_text()) if (out / "study.json").exists() else {}
        )
    counts = Counter(cell["status"] for cell in found.get("cells", {}).values())
    if done.returncode not in (0, 2):
        raise Partly(f"the study ended with {done.returncode}: {dict(counts)}", found)
    if done.returncode == 2:
        raise TimeUp(f"{counts['not run']} of {counts.total()} cells of the study are left", found)
    return found
