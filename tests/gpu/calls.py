"""Which checks each call of ``run.sh`` makes, most telling first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One entry.

    Attributes:
        name: "module:function" of a ``check(machine) -> dict``, see ``kit``.
        call: 1 needs nothing built, 2 builds TransformerEngine and needs it, 3 is about size, 4 about FP8.
        seconds: limit on a GPU, and on a CPU.
        needs: packages without which it is skipped: the bundle brings them to a machine that lacks them.
        environment: variables of its process.
        always: it leaves in the bundle what others need, so that having passed elsewhere does not stand for it.
    """

    name: str
    call: int
    seconds: float
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    always: bool = False


POLICY = ("megatron", "pydantic", "transformers", "safetensors")
SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)

CHECKS = (
    # ---- call 1: nothing is built -----------------------------------------------------------------------------------
    Check("tests.gpu.products:products", 1, 60),
    Check("tests.gpu.transport:collective", 1, 60),
    Check("tests.gpu.head:against_fp64", 1, 90, ("pydantic",)),
    Check("tests.gpu.head:kernels_beyond_int32", 1, 60, ("triton",)),
    Check("tests.gpu.policy:parity", 1, 90, POLICY),
    Check("tests.gpu.policy:bf16", 1, 60, POLICY),
    Check("tests.gpu.policy:three_steps", 1, 90, POLICY),
    Check("tests.gpu.waits:micro_batches", 1, 90, (*POLICY, "pytest", "hypothesis")),
    Check("tests.gpu.memory:offload", 1, 90, POLICY),
    Check("tests.gpu.memory:checkpoint", 1, 90, POLICY),
    Check("tests.gpu.transport:ipc", 1, 90),
    Check("tests.gpu.memory:context", 1, 60),
    Check("tests.gpu.transport:killed_sender", 1, 60),
    Check("tests.gpu.transport:expandable_segments", 1, 60),
    Check("tests.gpu.transport:checksums", 1, 60),
    Check("tests.gpu.head:sanitizer", 1, 120, ("triton", "pydantic")),
    Check("tests.gpu.head:benchmark", 1, 240, ("triton", "pydantic")),
    # ---- call 2: TransformerEngine ----------------------------------------------------------------------------------
    Check("tests.gpu.te_build:build", 2, 420, always=True),  # the others find what it leaves in the bundle
    Check("tests.gpu.layers:adapters", 2, 90, POLICY),
    Check("tests.gpu.size:adapters_of_7b", 2, 150, POLICY),
    Check("tests.gpu.layers:waits", 2, 90, POLICY),
    Check("tests.gpu.layers:parity", 2, 120, POLICY),
    Check("tests.gpu.layers:training", 2, 90, POLICY),
    Check("tests.gpu.layers:optimizer", 2, 60, POLICY),
    Check("tests.gpu.layers:rope", 2, 60, POLICY),
    Check("tests.gpu.layers:shapes", 2, 150, POLICY),
    # ---- call 3: size -----------------------------------------------------------------------------------------------
    Check("tests.gpu.te_build:build", 3, 420, always=True),  # seconds, where call 2's wheel was brought along
    Check("tests.gpu.size:profiles", 3, 120, POLICY),
    Check("tests.gpu.size:choices", 3, 120, POLICY),
    Check("tests.gpu.size:segments", 3, 90, POLICY, SEGMENTS),
    Check("tests.gpu.size:host_memory", 3, 120, POLICY),
    Check("tests.gpu.size:memory_and_mfu", 3, 420, POLICY),
    # ---- call 4: FP8 ------------------------------------------------------------------------------------------------
    Check("tests.gpu.study:fp8", 4, 1200, POLICY, always=True),  # it goes on where the last call ended
)
