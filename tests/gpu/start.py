"""``python -m tests.gpu.start MODULE ...``: runs a command of a GPU machine, or says why this
interpreter cannot.

One process does both, because torch takes long to import. Python 3.8 can read this file too.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    command = os.environ.get("COMMAND", "tests.gpu.start")
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        sys.exit(
            f"{command}: Python must be 3.11 or 3.12, {sys.executable} is "
            f"{sys.version.split()[0]}; set PYTHON"
        )
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"{command}: {sys.executable} cannot import torch ({error}); PYTHON=/path/to/python "
            "names another"
        )
    # the head needs fp32 sums of bf16 products (torch.addmm with out_dtype), the plain layers
    # variable-length attention
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        sys.exit(
            f"{command}: torch must be 2.11 or newer, {sys.executable} has {torch.__version__}; "
            "set PYTHON"
        )
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
