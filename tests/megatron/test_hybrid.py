"""Models whose layers have unlike kinds of attention: gated delta nets and gated attention."""

from __future__ import annotations

import pytest

from tests.megatron.test_family import require_transformers_numbers
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    return path, make_tiny_model(path, "qwen3_5_text")


def test_a_hybrid_equals_transformers_and_goes_out_as_it_came_in(checkpoint):
    path, model = checkpoint
    layouts = [
        {},
        {"tp": 2},
        {"tp": 2, "sp": True, "max_tokens": 30},
        {"pp": 2},
    ]
    require_transformers_numbers(path, model, layouts)
