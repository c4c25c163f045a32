"""Conflict masks of `gtpo_conflict`: the tokens that good and bad completions of a group share at
equal positions.

Positions are counted from the first token (forward) and from the last (backward), and scanned in
widening windows. A group leaves the scan as soon as none of its runs can grow any further, so short
spans, the usual case, cost little.

Shape suffixes: B = completions, N = tokens of all completions, Q = groups, R = signed rows in the
scan, W = positions of a window, g = groups in the scan, S = slots of a group, c = cells (one group
at one position).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from openrlhf_ext.algorithms.groups import Groups
from openrlhf_ext.algorithms.segments import Segments

FIRST_WINDOW = 64
WINDOW_GROWTH = 4
WINDOW_ELEMENTS = 1 << 20
LEADER_ROUNDS = 2
MOST_LEADER_ROUNDS = 8
SLOTS_PER_ROUND = 16


# ---- conflicting tokens of a window ----


def conflicting_tokens(tokens_gSW: Tensor, valid_gSW: Tensor | None, positive_gS: Tensor) -> Tensor:
    """Tokens that both a positive and a negative completion of the group have at that position.

    Each round finds the slots that hold the cell's smallest unsettled id; a few rounds settle cells
    with few distinct ids. A sort settles the rest. Work per token grows with the group only by the
    log of the sort.

    Args:
        tokens_gSW: integer ids below the largest number of their dtype.
        valid_gSW: True where the slot holds a token; None if all slots do.
        positive_gS: True for completions with a positive sign.
    Returns:
        (g, S, W) bool.
    """
    # Expand once: an operation that broadcasts over the innermost dimension is many times slower on
    # the CPU.
    positive_gSW = positive_gS[:, :, None].expand(tokens_gSW.shape).contiguous()
    nobody = torch.iinfo(tokens_gSW.dtype).max
    found_gSW = torch.zeros_like(tokens_gSW, dtype=torch.bool)
    open_gSW = valid_gSW
    # Sorting costs more for large cells, so they get more rounds first.
    for _ in range(
        max(LEADER_ROUNDS, min(MOST_LEADER_ROUNDS, tokens_gSW.shape[1] // SLOTS_PER_ROUND))
    ):
        unsettled_gSW = (
            tokens_gSW if open_gSW is None else tokens_gSW.masked_fill(~open_gSW, nobody)
        )
        same_gSW = unsettled_gSW == unsettled_gSW.amin(dim=1, keepdim=True)
        same_gSW = same_gSW if open_gSW is None else same_gSW & open_gSW
        found_gSW |= same_gSW & _both_signs(same_gSW, positive_gSW)
        open_gSW = ~same_gSW if open_gSW is None else open_gSW & ~same_gSW
        if not bool(open_gSW.any()):
            return found_gSW
        # A cell with a single sign left holds no further conflict.
        mixed_g1W = _both_signs(open_gSW, positive_gSW)
        if not bool(mixed_g1W.any()):
            return found_gSW
        open_gSW &= mixed_g1W
    open_gSW = torch.ones_like(found_gSW) if open_gSW is None else open_gSW
    group_c, position_c = _any(open_gSW, dim=1).nonzero(as_tuple=True)
    settled_cS = _conflicts_by_sorting(
        tokens_gSW[group_c, :, position_c], open_gSW[group_c, :, position_c], positive_gS[group_c]
    )
    found_gSW[group_c, :, position_c] |= settled_cS
    return found_gSW


def _both_signs(flags_gSW: Tensor, positive_gSW: Tensor) -> Tensor:
    """(g, 1, W) True if the flagged slots of a cell hold both signs."""
    positive_flags_gSW = flags_gSW & positive_gSW
    return (_any(positive_flags_gSW, dim=1) & _any(flags_gSW ^ positive_flags_gSW, dim=1))[:, None]


def _any(flags: Tensor, dim: int) -> Tensor:
    """`flags.any(dim)` on bytes; the CPU reduces bytes several times faster than bools."""
    return flags.view(torch.uint8).amax(dim=dim).view(torch.bool)


def _conflicts_by_sorting(tokens_cS: Tensor, open_cS: Tensor, positive_cS: Tensor) -> Tensor:
    """(c, S) conflicts per cell, by sorting (id, sign): an id's positives come right before its
    negatives."""
    largest = torch.iinfo(torch.int64).max
    rank_cS = torch.where(open_cS, tokens_cS.long() * 2 + (~positive_cS).long(), largest)
    rank_cS, slot_cS = rank_cS.sort(dim=1)
    negative_cS = (rank_cS & 1).bool()
    # The ids (ranks without the sign bit) of the nearest positive before and the nearest negative
    # after each place.
    id_cS = rank_cS >> 1
    before_cS = torch.where(negative_cS, -largest, id_cS).cummax(dim=1).values
    after_cS = torch.where(negative_cS, id_cS, largest).flip(1).cummin(dim=1).values.flip(1)
    conflict_cS = torch.where(negative_cS, before_cS, after_cS) == id_cS
    return torch.zeros_like(open_cS).scatter_(1, slot_cS, conflict_cS) & open_cS


# ---- Runs of conflicts ----


@dataclasses.dataclass
class _Scan:
    """Signed completions whose run may still grow, in a padded (group, slot) table.

    Attributes:
        row_R: batch row.
        first_R: flat index of the row's first token.
        length_R: tokens of the row.
        positive_R: True for a positive sign.
        group_R, slot_R: position in the table.
        alive_R: the run may still grow.
        started_R: the run has begun.
    """

    row_R: Tensor
    first_R: Tensor
    length_R: Tensor
    positive_R: Tensor
    group_R: Tensor
    slot_R: Tensor
    alive_R: Tensor
    started_R: Tensor

    @classmethod
    def of(cls, groups: Groups, sign_B: Tensor, anchored: bool) -> _Scan:
        """Completions with a sign, from groups that have both signs, ordered by group."""
        both_Q = groups.any(sign_B > 0) & groups.any(sign_B < 0)
        order_B = groups.natural_order()
        row_R = order_B[((sign_B != 0) & both_Q[groups.index_B])[order_B]]
        group_R, slot_R = _slots(groups.index_B[row_R])
        return cls(
            row_R=row_R,
            first_R=(groups.lengths_B.cumsum(0) - groups.lengths_B)[row_R],
            length_R=groups.lengths_B[row_R],
            positive_R=sign_B[row_R] > 0,
            group_R=group_R,
            slot_R=slot_R,
            alive_R=torch.ones_like(row_R, dtype=torch.bool),
            started_R=torch.full_like(row_R, anchored, dtype=torch.bool),
        )

    def narrowed(self, position: int) -> _Scan:
        """The scan with only groups in which a run may still grow, and only rows with a token at
        `position` or later."""
        live_g = torch.zeros(len(self.group_R), dtype=torch.bool, device=self.row_R.device)
        live_g[self.group_R[self.alive_R]] = True
        keep_R = live_g[self.group_R] & (self.length_R > position)
        if bool(keep_R.all()):
            return self
        kept = {f.name: getattr(self, f.name)[keep_R] for f in dataclasses.fields(self)}
        kept["group_R"], kept["slot_R"] = _slots(kept["group_R"])
        return _Scan(**kept)

    @property
    def table_shape(self) -> tuple[int, int]:
        return int(self.group_R[-1]) + 1, int(self.slot_R.max()) + 1


def _slots(group_R: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber sorted group indices to 0.. and number the rows of each group."""
    _, dense_R, counts = group_R.unique_consecutive(return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    return dense_R, torch.arange(len(group_R), device=group_R.device) - first[dense_R]


@dataclasses.dataclass(frozen=True)
class Spans:
    """At most one span of tokens per completion: `count_B` tokens from position `start_B` on."""

    start_B: Tensor
    count_B: Tensor

    def mask(self, segments: Segments) -> Tensor:
        """(N,) bool."""
        mask_N = torch.zeros(segments.tokens, dtype=torch.bool, device=self.start_B.device)
        first_B = segments.lengths_B.cumsum(0) - segments.lengths_B + self.start_B
        for first, count in zip(first_B.tolist(), self.count_B.tolist(), strict=True):
            mask_N[first : first + count] = True
        return mask_N


def conflict_spans(
    tokens_N: Tensor, groups: Groups, sign_B: Tensor, *, backward: bool, anchor: str = "start"
) -> Spans:
    """The run of consecutive conflicts of each completion.

    Args:
        tokens_N: ids.
        groups: grouping and lengths.
        sign_B: sign of the advantage; completions with sign 0 are not scanned.
        backward: scan from each completion's last token.
        anchor: "start": the run begins at the first scanned token; "first": the first run found at
            any position.
    """
    start_B, count_B = torch.zeros_like(groups.lengths_B), torch.zeros_like(groups.lengths_B)
    scan = _Scan.of(groups, sign_B, anchored=anchor == "start")
    position, width = 0, FIRST_WINDOW
    while bool(scan.alive_R.any()):
        scan = scan.narrowed(position)
        if len(scan.row_R) == 0:
            break
        rows, slots = scan.table_shape
        width = max(1, min(width, WINDOW_ELEMENTS // (rows * slots)))
        _extend_runs(start_B, count_B, tokens_N, scan, position, width, backward)
        position, width = position + width, WINDOW_GROWTH * width
    return Spans(groups.lengths_B - start_B - count_B if backward else start_B, count_B)


def _extend_runs(
    start_B: Tensor,
    count_B: Tensor,
    tokens_N: Tensor,
    scan: _Scan,
    position: int,
    width: int,
    backward: bool,
) -> None:
    """Scan one window: lengthen the runs (`start_B`, `count_B` in scan direction) and update the
    scan state."""
    width = min(width, int(scan.length_R.max()) - position)
    position_W = torch.arange(width, device=tokens_N.device, dtype=torch.int32)
    token_RW = _window_tokens(tokens_N, scan, position, width, backward)
    covered = int(scan.length_R.min()) >= position + width
    valid_RW = None if covered else position_W < (scan.length_R - position)[:, None]
    conflict_RW = _conflicts_in_window(token_RW, valid_RW, scan)
    if bool(scan.started_R.all()):
        first_R = torch.zeros_like(scan.row_R)
        stop_R = _first(~conflict_RW, position_W)
    else:
        first_R = _first(conflict_RW, position_W).masked_fill(scan.started_R, 0)
        stop_R = _first(~conflict_RW & (position_W >= first_R[:, None]), position_W)
        fresh_R = scan.alive_R & ~scan.started_R & (first_R < width)
        start_B[scan.row_R[fresh_R]] = position + first_R[fresh_R].long()
        scan.started_R = scan.started_R | (first_R < width)
    count_B[scan.row_R] += torch.where(scan.alive_R, stop_R - first_R, 0).long()
    scan.alive_R = scan.alive_R & (stop_R == width) & (scan.length_R > position + width)


def _first(flags_RW: Tensor, position_W: Tensor) -> Tensor:
    """(R,) int32 index of the first True, W if a row has none."""
    width = len(position_W)
    return (position_W + width * (~flags_RW).to(torch.int32)).amin(dim=1).clamp_(max=width)


def _window_tokens(
    tokens_N: Tensor, scan: _Scan, position: int, width: int, backward: bool
) -> Tensor:
    """(R, W) ids of a window in scan direction, int32 if they fit; arbitrary ids where a row has no
    token."""
    offset_W = torch.arange(position, position + width, device=tokens_N.device)
    if backward:
        index_RW = (scan.first_R + scan.length_R - 1)[:, None] - offset_W
    else:
        index_RW = scan.first_R[:, None] + offset_W
    # An index beyond a completion's end reads the next completion; the clamp keeps it inside the
    # batch.
    token_RW = tokens_N.take(index_RW.clamp_(0, len(tokens_N) - 1))
    int32 = torch.iinfo(torch.int32)
    # PyTorch vectorizes reductions over int32, but not over int64.
    least, most = torch.aminmax(token_RW)
    fits = int(most) < int32.max and int(least) >= int32.min
    return token_RW.to(torch.int32) if fits else token_RW


def _conflicts_in_window(token_RW: Tensor, valid_RW: Tensor | None, scan: _Scan) -> Tensor:
    """(R, W) conflicts, computed in the padded (group, slot) table."""
    table = (*scan.table_shape, token_RW.shape[1])
    if table[0] * table[1] == len(token_RW):
        # Groups of equal size fill the table exactly, so a view suffices.
        valid_gSW = None if valid_RW is None else valid_RW.view(table)
        return conflicting_tokens(
            token_RW.view(table), valid_gSW, scan.positive_R.view(table[:2])
        ).view(token_RW.shape)
    slots = (scan.group_R, scan.slot_R)
    token_gSW = token_RW.new_zeros(table)
    valid_gSW = scan.positive_R.new_zeros(table)
    positive_gS = scan.positive_R.new_zeros(table[:2])
    token_gSW[slots], positive_gS[slots] = token_RW, scan.positive_R
    valid_gSW[slots] = True if valid_RW is None else valid_RW
    return conflicting_tokens(token_gSW, valid_gSW, positive_gS)[slots]
