"""Our weight map against mbridge's: the same parameters on every rank."""

from __future__ import annotations

import pytest

from tests.launch import launch
from tests.models import make_tiny_model

pytest.importorskip("mbridge", reason="mbridge is in the dev extra")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_rank_holds_what_mbridge_loads(tmp_path, tp, pp):
    models = []
    for family, tied in [("qwen2", False), ("qwen3", False), ("llama", False), ("qwen2", True)]:
        models.append(str(tmp_path / f"{family}-{tied}"))
        make_tiny_model(tmp_path / f"{family}-{tied}", family, tied=tied, vocab=64)
    for rank in launch(
        "tests.megatron.mbridge_worker", "compare", 2, models=models, ranks=2, tp=tp, pp=pp
    ):
        assert rank == [[]] * len(models)
