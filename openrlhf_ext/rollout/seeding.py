"""Sampling that does not depend on the order in which requests arrive, nor on which engine serves them."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence


class RequestSeeds:
    """Derives a seed for every request.

    The seed is a function of the base seed, the version of the weights, the prompt's tokens, and how many requests for
    this prompt came before it under these weights. The samples of a group thus differ from each other, and a rerun of a
    step draws the same ones. (Two requests for one prompt in two engines at once draw the same sample: prompts of a
    batch should be distinct.)
    """

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed
        self._version = 0
        self._served: Counter[bytes] = Counter()

    def start_version(self, version: int) -> None:
        """Count requests anew: the weights are now those of `version`."""
        self._version = version
        self._served.clear()

    def forget_requests(self) -> None:
        """Count requests anew under the same weights: those made so far were no rollouts of a training step."""
        self._served.clear()

    def next_seed(self, prompt_token_ids: Sequence[int]) -> int:
        """Seed of the next request for this prompt, below 2**63."""
        prompt = hashlib.blake2b(struct.pack(f"<{len(prompt_token_ids)}q", *prompt_token_ids), digest_size=16).digest()
        nth = self._served[prompt]
        self._served[prompt] += 1
        key = struct.pack("<qqq", self._base_seed, self._version, nth) + prompt
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
