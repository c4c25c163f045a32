from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from openrlhf_ext.checkpoints.files import read_plain, write_plain
from openrlhf_ext.checkpoints.model_state import STATE, model_faults
from openrlhf_ext.megatron.model.shape import read_model_shape
from tests.models import make_tiny_model


def test_a_checkpoint_is_of_the_model_that_has_all_it_says_of_it(tmp_path: Path) -> None:
    """Checkpoints of earlier releases say less."""
    make_tiny_model(tmp_path, "smollm3")
    shape = asdict(read_model_shape(tmp_path))
    ours = {"shape": shape, "param_dtype": "fp32"}
    write_plain(tmp_path, STATE, ours)
    theirs = read_plain(tmp_path / STATE)
    assert theirs["shape"]["layers_without_rope"] == (3,) and not [
        *model_faults(tmp_path, theirs, ours)
    ]
    for later in (
        "embedding_factor",
        "attention_scale",
        "logits_divisor",
        "layers_without_rope",
        "window",
    ):
        del theirs["shape"][later]
    assert not [*model_faults(tmp_path, theirs, ours)]
    (fault,) = model_faults(
        tmp_path, read_plain(tmp_path / STATE), {**ours, "shape": shape | {"logits_divisor": 8.0}}
    )
    assert "is of another model: logits_divisor 1.0, the model has 8.0" in fault
