"""Loads a Hugging Face checkpoint into the Megatron policy, exports it again, and compares with the
files.

Two proofs on the real weights in a real layout: what comes out is bit for bit what went in, and the
model in between computes what transformers computes (log-probs of random token sequences).
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.groups.stores import open_store
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.families import family_of, model_types
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.family import Family
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint, HFRows
from openrlhf_ext.megatron.model.shape import read_model_shape

LOGPROB_TOLERANCES = {"fp32": 1e-4, "bf16": 0.1}
"""Nats, mean over the tokens. One token's rounding grows with the model: of SmolLM2-135M in bf16
the mean is 0.02, the largest of 159 random tokens 0.06 to 0.38, and two exchanged layers make a
mean of 0.57."""
_SEED = 20260101


@dataclass(frozen=True)
class CheckSettings:
    """What is checked, and how; plain values, so that they travel to the ranks.

    Random sequences of at most ``tokens`` pass with a mean log-prob difference of ``tolerance``
    nats; ``timeout_s``:
    longest wait in one collective call, and for all ranks together.
    """

    path: str
    layout: ParallelLayout
    dtype: Literal["bf16", "fp32"]
    sequences: int = 4
    tokens: int = 64
    tolerance: float = LOGPROB_TOLERANCES["fp32"]
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class CheckReport:
    """``different``: exported tensors that are not bit for bit those of the files (cast to the
    dtype); ``missing``:
    those of the files that were not exported, apart from those that no model reads."""

    tensors: int
    parameters: int
    different: tuple[str, ...]
    missing: tuple[str, ...]
    max_logprob_difference: float
    mean_logprob_difference: float
    seconds: dict[str, float]

    def passed(self, tolerance: float) -> bool:
        """Whether both proofs hold; a NaN difference fails."""
        return not self.different and not self.missing and self.mean_logprob_difference <= tolerance


def check_conversion(settings: CheckSettings) -> CheckReport:
    """Runs the check on as many processes of this machine as the layout has ranks.

    Raises torch.multiprocessing's ProcessRaisedException or ProcessExitedException, or
    TimeoutError.
    """
    import torch.multiprocessing as multiprocessing

    # this process serves the rendezvous, so that nobody else can take the port before the ranks do
    store = open_store("127.0.0.1")
    # not a queue: rank 0 would wait for somebody to read a long report
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        ranks = multiprocessing.spawn(
            _run_rank, (settings, store.port, report), nprocs=settings.layout.world_size, join=False
        )
        deadline = time.monotonic() + settings.timeout_s
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"checking {settings.path} was not finished after {settings.timeout_s:g} s"
                    )
        finally:
            for process in ranks.processes:
                process.kill()
        return pickle.loads(report.read_bytes())


def _run_rank(rank: int, settings: CheckSettings, port: int, report: Path) -> None:
    from openrlhf_ext.patches import apply

    apply()
    from openrlhf_ext.megatron.distributed import initialize_distributed
    from openrlhf_ext.megatron.policy import MegatronPolicy
    from openrlhf_ext.megatron.settings import ModelSettings
    from openrlhf_ext.options.sections import Megatron

    size = settings.layout.world_size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    started = time.perf_counter()
    initialize_distributed(settings.layout, settings.timeout_s, _SEED)
    megatron = Megatron(param_dtype=settings.dtype)
    policy = MegatronPolicy(
        ModelSettings(settings.path, settings.layout, megatron, max_len=settings.tokens)
    )
    loaded = time.perf_counter()
    different, missing, counts = compare_export(
        policy.export_rows(), HFCheckpoint(settings.path), rank, output=policy.shape.family.output
    )
    exported = time.perf_counter()
    sequences = random_sequences(policy.shape.vocab_size, settings.sequences, settings.tokens)
    ours = _policy_logprobs(policy, sequences)
    scored = time.perf_counter()
    if rank == 0:
        theirs = transformers_logprobs(settings.path, sequences, policy.dtype, policy.device)
        gaps = (ours.double() - theirs.double()).abs()
        seconds = {
            "load": loaded - started,
            "export": exported - loaded,
            "log-probs": scored - exported,
        }
        seconds["transformers"] = time.perf_counter() - scored
        found = CheckReport(
            *counts, different, missing, float(gaps.max()), float(gaps.mean()), seconds
        )
        report.write_bytes(pickle.dumps(found))
    torch.distributed.barrier()  # no rank may leave while rank 0 still compares
    torch.distributed.destroy_process_group()


def compare_export(
    exported: Iterable[HFRows],
    checkpoint: HFCheckpoint,
    rank: int = 0,
    *,
    output: str = "lm_head.weight",
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, int]]:
    """Names that differ, names that did not come, and (tensors, parameters) that came; nothing but
    waits off rank 0.

    Bits are compared, not values: NaNs and the two zeros count.
    """
    different: set[str] = set()
    rows: Counter[str] = Counter()
    parameters = 0
    for part in exported:
        rows[part.name] += len(part.values)
        parameters += part.values.numel()
        if part.name not in checkpoint.names or not _same_rows(part, checkpoint):
            different.add(part.name)
    different |= {
        name
        for name in rows.keys() & checkpoint.names
        if rows[name] != checkpoint.header(name)[0][0]
    }
    unread = {name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")}
    if output not in rows:  # tied: the files may carry a copy of the embedding
        unread.add(output)
    missing = checkpoint.names - rows.keys() - unread if rank == 0 else set()
    return tuple(sorted(different)), tuple(sorted(missing)), (len(rows), parameters)


def nearest_family(path: str | Path) -> str:
    """Which family a checkpoint of an unknown model type resembles most, by the names of its
    tensors, and what is different in them and in its ``config.json``."""
    held = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in HFCheckpoint(path).names}
    # plain ones first
    families = sorted(map(family_of, model_types()), key=lambda family: bool(family.factors))
    family = min(families, key=lambda family: len(held ^ _names(family)))
    names = _names(family)
    more, fewer = sorted(held - names - {family.output}), sorted(names - held)
    lines = [f"tensors that {family.model_type} has not: {', '.join(more)}"] if more else []
    lines += [f"tensors that it alone has: {', '.join(fewer)}"] if fewer else []
    try:
        read_model_shape(path, model_type=family.model_type)
    except InputError as error:
        lines.append(str(error))
    alike = "the same tensors and entries, which does not prove that the same is computed of them"
    what = "; what differs: " + "; ".join(lines) if lines else f": {alike}"
    return f"nearest: {family.model_type}{what}; a family of your own: docs/models.md"


def _names(family: Family) -> set[str]:
    """Of a checkpoint's tensors, N in the place of every number."""
    rules = [family.embedding_rule, family.final_norm_rule, *family.all_layer_rules]
    return {
        name.replace("{layer}", "N").replace("{expert}", "N")
        for rule in rules
        for name in rule.hf_names
    }


def _same_rows(part: HFRows, checkpoint: HFCheckpoint) -> bool:
    stop = part.start + len(part.values)
    if stop > checkpoint.header(part.name)[0][0]:
        return False
    expected = checkpoint.read(part.name, 0, part.start, stop)
    return same_bits(expected.to(part.values.dtype), part.values.cpu())


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def random_sequences(vocab_size: int, count: int, longest: int) -> list[Tensor]:
    """(S,) int64 token rows of ``count`` different lengths between 2 and ``longest``; the same in
    every process."""
    generator = torch.Generator().manual_seed(_SEED)
    lengths = torch.linspace(longest, max(2, longest // 2), count).round().long().tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def _policy_logprobs(policy: Any, sequences: list[Tensor]) -> Tensor:
    """(N,) log-probs of every token after a sequence's first, sequence after sequence."""
    from openrlhf_ext.megatron.step.batch import sequence_batch

    batch = sequence_batch(
        [tokens.numpy() for tokens in sequences], [[(1, len(tokens))] for tokens in sequences]
    )
    return policy.logprobs(batch, temperature=1.0).logprobs_N


@torch.no_grad()
def transformers_logprobs(
    path: str | Path, sequences: list[Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The same from transformers' model, one sequence at a time, softmax in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    model.to(device).eval()
    rows = []
    for sequence in (s.to(device) for s in sequences):
        log_p = model(sequence[None]).logits[0, :-1].float().log_softmax(-1)
        rows.append(log_p.gather(1, sequence[1:, None]).squeeze(1).cpu())
    return torch.cat(rows)
