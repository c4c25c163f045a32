"""How a call is cut into tiles of logits that fit the workspace.

A block of tokens meets one slice of the vocabulary after the other. Both are cut, so that the workspace neither grows
with the number of tokens nor with the vocabulary, and the products keep shapes that run at full speed.

Shape suffixes in comments: B = tokens of a block, S = columns of a slice, V = rows of the vocabulary shard.
"""

from __future__ import annotations

from dataclasses import dataclass

# Larger blocks win nothing measurable on a CPU; on a GPU they cost memory for each block's hidden states.
_MOST_TOKENS = 2048
# On a CPU a tile of the statistics, which go over it several times, should stay in the cache: 2^21 fp32 logits are
# 8 MiB. Gradients go over it less often, and their three products are faster on wider slices.
_CPU_TILE_ELEMENTS = 1 << 21
_CPU_GRADIENT_TILE_ELEMENTS = 1 << 23
# A narrower slice, a smaller block, or a one-pass head on fewer tokens would make the products slow. A block's gradient
# of the weight reads and writes V H fp32 numbers, which on a GPU takes longer than the product below ~1,000 tokens.
_FEWEST_COLUMNS = 128
_FEWEST_TOKENS = 16
_FEWEST_ONE_PASS_TOKENS = {"cpu": 128, "cuda": 1024}
_ONE_PASS_COLUMNS = {"cpu": 4096, "cuda": 8192}


@dataclass(frozen=True)
class TileCosts:
    """Bytes of workspace that a tile takes.

    Attributes:
        logit: for each logit of a tile.
        kept: for each logit of a block that is kept for all slices (one-pass heads).
        token: for each token of a block (copies of its hidden state, its gradient).
        column: for each column of a slice (a widened copy of the weight).
        part: for each slice of a block that is kept, and token (its statistics).
    """

    logit: int
    kept: int
    token: int
    column: int
    part: int = 0


@dataclass(frozen=True)
class TilePlan:
    """Tokens of a block (at most) and columns of a slice (at most); ``keeps``: all slices of a block are kept."""

    tokens: int
    columns: int
    keeps: bool = False

    def slices(self, true_rows: int) -> list[slice]:
        return [slice(first, min(first + self.columns, true_rows)) for first in range(0, true_rows, self.columns)]


def tile_plan(
    tokens: int, rows: int, costs: TileCosts, workspace_bytes: int, device_type: str, *, statistics: bool = True
) -> TilePlan:
    """Blocks and slices for a head that forgets a tile before it makes the next.

    The workspace bounds the tile down to 16 tokens times 128 columns, and is exceeded below.

    Args:
        tokens, rows: of the whole call; of a shard, padding included, so that every rank makes the same plan.
        statistics: the tiles are made for statistics, and not for gradients alone.
    """
    block = min(tokens, _MOST_TOKENS, max(_FEWEST_TOKENS, workspace_bytes // (2 * max(1, costs.token))))
    block = _even(tokens, block)
    columns = (workspace_bytes - block * costs.token) // (block * costs.logit + costs.column)
    if device_type == "cpu":
        most = _CPU_TILE_ELEMENTS if statistics else _CPU_GRADIENT_TILE_ELEMENTS
        columns = min(columns, max(most // block, _FEWEST_COLUMNS))
    while columns < min(rows, _FEWEST_COLUMNS) and block > _FEWEST_TOKENS:
        block = max(_FEWEST_TOKENS, block // 2)
        columns = (workspace_bytes - block * costs.token) // (block * costs.logit + costs.column)
    columns = max(columns - columns % _FEWEST_COLUMNS, _FEWEST_COLUMNS)
    return TilePlan(block, max(1, min(columns, rows)))


def one_pass_plan(
    tokens: int, rows: int, costs: TileCosts, workspace_bytes: int, device_type: str, *, force: bool
) -> TilePlan | None:
    """Blocks and slices for a head that keeps a block's tiles until their gradient.

    None if the blocks would be too small for fast products, unless ``force``d.
    """
    columns = max(1, min(rows, _ONE_PASS_COLUMNS.get(device_type, _ONE_PASS_COLUMNS["cuda"])))
    token = rows * costs.kept + columns * costs.logit + costs.token + -(-rows // columns) * costs.part
    block = (workspace_bytes - columns * costs.column) // token
    fewest = _FEWEST_ONE_PASS_TOKENS.get(device_type, _FEWEST_ONE_PASS_TOKENS["cuda"])
    if block < min(tokens, fewest) and not force:
        return None
    return TilePlan(_even(tokens, max(1, min(tokens, block, _MOST_TOKENS))), columns, keeps=True)


def _even(total: int, most: int) -> int:
    """Size of equal pieces of ``total`` that are at most ``most``; 1 for nothing."""
    pieces = -(-total // most) if total else 1
    return max(1, -(-total // pieces))
