"""Which checks each call of ``run.sh`` makes, most telling first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One entry.

    Attributes:
        name: "module:function" of a ``check(machine) -> dict``, see ``kit``.
        call: 0 is what decides most in nine minutes, from the whole bundle, in the order of what a
            second decides; 1 needs nothing built, 2 builds TransformerEngine and needs it, 3 is
            about size, 4 about FP8, 5 and 6 are whole runs with vLLM and Ray: 5 the ways of a run,
            6 failures and real sizes.
        seconds: limit on a GPU, and on a CPU.
        needs: packages without which it is skipped: the bundle brings them to a machine that lacks
        them.
        environment: variables of its process.
        always: it leaves in the bundle what others need, so that having passed elsewhere does not
        stand for it.
    """

    name: str
    call: int
    seconds: float
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    always: bool = False


POLICY = ("megatron", "pydantic", "transformers", "safetensors")
SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
ONE_QUEUE = (("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "1"),)
ENGINE = ("vllm", "pydantic", "transformers", "tokenizers", "safetensors")
RUN = (*POLICY, "vllm", "ray", "openrlhf", "psutil", "tokenizers")

CHECKS = (
    # ---- call 0: nine minutes. Limits are twice the seconds that each is expected to take
    Check("tests.gpu.transport:checksums", 0, 30),  # every sync is proved by this sum: 10 s
    Check("tests.gpu.head:against_fp64", 0, 60, ("pydantic",)),  # 25 s
    Check("tests.gpu.transport:ipc", 0, 60),  # frames, versions, a dead engine: 25 s
    # FlashAttention 3, both levels of sleep: 55 s
    Check("tests.gpu.engine_alone:first", 0, 110, ENGINE),
    Check("tests.gpu.flight:base", 0, 190, RUN),  # everything once: 95 s
    Check("tests.gpu.memory:streaming_of_four_shards", 0, 60, (*POLICY, "psutil")),  # 30 s
    Check("tests.gpu.flight:mixture", 0, 240, RUN),  # replay, experts' reload and sums: 120 s
    Check("tests.gpu.flight:drift_check", 0, 150, RUN),  # sleep and wake move nothing: 75 s
    Check("tests.gpu.engine_alone:graphs", 0, 180, ENGINE),  # compile and capture: 90 s
    Check("tests.gpu.flight:adapters", 0, 160, RUN),  # if time is left: 80 s
    # ---- call 1: nothing is built
    # its kernels compile first
    Check("tests.gpu.delta:against_the_rule", 1, 120, POLICY),
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
    # ---- call 2: TransformerEngine
    # the others find what it leaves in the bundle
    Check("tests.gpu.te_build:build", 2, 420, always=True),
    Check("tests.gpu.layers:adapters", 2, 90, POLICY),
    Check("tests.gpu.size:adapters_of_7b", 2, 150, POLICY),
    Check("tests.gpu.layers:waits", 2, 90, POLICY),
    Check("tests.gpu.layers:parity", 2, 120, POLICY),
    Check("tests.gpu.layers:mixture", 2, 90, POLICY),
    Check("tests.gpu.layers:training", 2, 90, POLICY),
    Check("tests.gpu.layers:optimizer", 2, 60, POLICY),
    Check("tests.gpu.memory:streaming", 2, 150, (*POLICY, "psutil")),
    Check("tests.gpu.memory:streaming_by_one_queue", 2, 150, (*POLICY, "psutil"), ONE_QUEUE),
    Check("tests.gpu.layers:rope", 2, 60, POLICY),
    Check("tests.gpu.layers:shapes", 2, 150, POLICY),
    # ---- call 3: size
    # seconds, where call 2's wheel was brought along
    Check("tests.gpu.te_build:build", 3, 420, always=True),
    Check("tests.gpu.size:profiles", 3, 120, POLICY),
    Check("tests.gpu.size:choices", 3, 120, POLICY),
    Check("tests.gpu.size:segments", 3, 90, POLICY, SEGMENTS),
    Check("tests.gpu.size:host_memory", 3, 120, POLICY),
    Check("tests.gpu.size:memory_and_mfu", 3, 420, POLICY),
    # ---- call 4: FP8
    # it goes on where the last call ended
    Check("tests.gpu.study:fp8", 4, 1200, POLICY, always=True),
    # ---- call 5: the first flight
    # before any Ray: each of its lines is one fact
    Check("tests.gpu.engine_alone:first", 5, 180, ENGINE),
    Check("tests.gpu.flight:base", 5, 270, RUN),
    Check("tests.gpu.flight:drift_check", 5, 270, RUN),
    Check("tests.gpu.engine_alone:graphs", 5, 180, ENGINE),
    Check("tests.gpu.flight:graphs", 5, 270, RUN),
    Check("tests.gpu.flight:entropies", 5, 270, RUN),
    Check("tests.gpu.flight:adapters", 5, 270, RUN),
    Check("tests.gpu.flight:fp8", 5, 270, RUN),
    Check("tests.gpu.engine_alone:v1_runner", 5, 120, ENGINE),
    Check("tests.gpu.flight:v1_runner", 5, 270, RUN),
    # ---- call 6: failures, repetition, real sizes; more than one call's minutes: --only,
    # --skip-passed --------------
    Check("tests.gpu.flight:killed_generating", 6, 270, RUN),
    Check("tests.gpu.flight:killed_in_a_sync", 6, 270, RUN),
    Check("tests.gpu.flight:mixture", 6, 270, RUN),
    Check("tests.gpu.flight:determinism", 6, 300, RUN),
    # exact mode: each explains a failure of the next
    Check("tests.gpu.exactness:norms", 6, 90, ENGINE),
    Check("tests.gpu.exactness:products", 6, 120, ENGINE),
    Check("tests.gpu.exactness:attention", 6, 90, ENGINE),
    Check("tests.gpu.exactness:policy_and_engine", 6, 300, RUN),
    Check("tests.gpu.flight:real_model", 6, 360, RUN),
    Check("tests.gpu.engine_alone:of_7b", 6, 240, ENGINE),
    Check("tests.gpu.engine_alone:of_7b_graphs_to_1024", 6, 240, ENGINE),
    Check("tests.gpu.flight:of_7b", 6, 420, RUN),
    # seconds, where call 2's wheel was brought along
    Check("tests.gpu.te_build:build", 6, 420, always=True),
    Check("tests.gpu.flight:transformer_engine", 6, 360, RUN),
)
