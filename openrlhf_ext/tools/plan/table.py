"""A proved layout as text."""

from __future__ import annotations

from openrlhf_ext.tools.plan.layout_proof import LayoutProof, RankShare

_GIB = 1 << 30
_RANKS_SHOWN = 6
_HEADER = ("tp", "pp", "layers", "parameters", "weights", "gradients", "optimizer", "GiB together", "ranks")


def format_proof(proof: LayoutProof) -> str:
    """One row for every distinct rank, and what was proved."""
    rows = [_HEADER, *map(_row, proof.shares)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    table = ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    heaviest = max(proof.shares, key=lambda share: share.state_bytes)
    title = "memory per rank before activations (weights, fp32 gradients, optimizer), GiB:"
    return "\n".join([title, *table, *_conclusions(proof, heaviest)]) + "\n"


def _row(share: RankShare) -> tuple[str, ...]:
    sizes = (share.weight_bytes, share.gradient_bytes, share.optimizer_bytes, share.state_bytes)
    layers = " ".join(f"{layers[0]}-{layers[-1]}" for layers in share.layers)
    memory = [f"{size / _GIB:.3f}" for size in sizes]
    return str(share.tensor), str(share.pipeline), layers, f"{share.parameters:,}", *memory, _ranks(share.ranks)


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = " ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown if len(ranks) <= _RANKS_SHOWN else f"{shown} ... ({len(ranks)})"


def _conclusions(proof: LayoutProof, heaviest: RankShare) -> list[str]:
    return [
        f"built {len(proof.shares)} of {proof.layout.world_size} ranks on the meta device in {proof.seconds:.1f} s; "
        "those of one row differ in their data- or context-parallel coordinate only and hold the same",
        f"{proof.hf_tensors} HF tensors, {proof.hf_parameters:,} parameters: names and shapes are those of "
        "transformers' model, every entry has exactly one place, every parameter of every rank is filled exactly once",
        f"the heaviest rank is {heaviest.ranks[0]}: {heaviest.state_bytes / _GIB:.2f} GiB before activations",
    ]
