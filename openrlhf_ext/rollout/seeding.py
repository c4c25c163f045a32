"""Sampling that does not depend on the order in which requests arrive, nor on which engine serves them."""

from __future__ import annotations

import hashlib
import struct


def derived_seed(*numbers: int) -> int:
    """A seed below 2**63 that is a function of these numbers, the first of which may be a seed itself.

    A group's is derived from the run's seed and the group's number, a completion's from its group's and its place in
    the group, a later turn's from its completion's: a group that is asked for again draws the same samples, and two
    groups of one prompt draw different ones.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
