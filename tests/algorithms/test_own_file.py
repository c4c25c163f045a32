"""An algorithm in a file of the user's own."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.own_file import algorithm_of_file
from tests.algorithms.helpers import random_groups, to_batch

METHOD = """
from openrlhf_ext.algorithms import register_algorithm
from openrlhf_ext.algorithms.baselines import Grpo, GrpoOptions

@register_algorithm("{name}", GrpoOptions)
class Negated(Grpo):
    def advantages(self, inputs):
        fields = super().advantages(inputs)
        return fields | {{"advantages": -fields["advantages"]}}
"""


def test_its_file_is_run_once_and_gives_its_name(tmp_path):
    file = tmp_path / "negated.py"
    file.write_text(METHOD.format(name="own_negated"))
    assert algorithm_of_file(str(file)) == algorithm_of_file(str(file)) == "own_negated"
    batch, _, _ = to_batch(random_groups(0))
    ours, grpo = (get_algorithm(name).shape(batch).advantages for name in ("own_negated", "grpo"))
    assert torch.equal(ours, -grpo) and grpo.abs().sum() > 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must register one algorithm with register_algorithm, got none"),
        (METHOD.format(name="own_one") + METHOD.format(name="own_two"), "got own_one, own_two"),
        ("\n\nraise KeyError('x')", "cannot be imported: line 3: KeyError: 'x'"),
        ("def f(:", "cannot be imported: SyntaxError"),
        (METHOD.format(name="grpo"), "cannot be imported: line 5: ValueError: algorithm 'grpo' is already registered"),
    ],
    ids=["none", "two", "raises", "syntax", "taken"],
)
def test_a_file_that_gives_no_algorithm_is_refused(tmp_path, text, problem):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match="broken.py") as error:
        algorithm_of_file(str(file))
    assert problem in str(error.value)
