"""Scripts for earlier releases of OpenRLHF are told the present names."""

from __future__ import annotations

import pytest

from openrlhf_ext.config import option_table
from openrlhf_ext.config.upstream import RENAMED, present_name


def test_every_present_name_is_an_option_and_no_earlier_one_is():
    for earlier, present in RENAMED.items():
        assert present.split()[0] in option_table(), earlier
        assert earlier not in option_table()


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        ("pretrain", "actor.model_name_or_path"),
        ("micro_train_batch_size", "train.micro_batch_size"),
        ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),  # eval has one of that name too
        ("actor_num_nodes", "actor.num_nodes"),
        ("ds_tensor_parallel_size", "ds.tensor_parallel_size"),
        ("max_epochs", "train.max_epochs"),
        ("wandb_project", "logger.wandb.project"),
        ("algo.advantage.is_correction_enable", "algo.advantage.is_correction_level token"),
        ("no_such_name", None),
        ("algo.max_epochs", None),
        ("num_nodes", None),
    ],
)
def test_an_earlier_name_has_one_present_name(earlier, present):
    assert present_name(earlier) == present


def test_a_whole_script_is_told_at_once(problems):
    found = problems("--pretrain", "model", "--micro_train_batch_size", "4", "--zero_stage", "3")
    assert "write --actor.model_name_or_path" in found[0]
    assert "write --train.micro_batch_size" in found[1]
    assert "ds.zero_stage, which is refused here" in found[2] and "megatron.tensor_parallel_size" in found[2]
    assert len(found) == 3
