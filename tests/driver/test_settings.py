from __future__ import annotations

import pytest

from openrlhf_ext.config import load_config
from openrlhf_ext.driver.settings import check_frozen_steps, policy_settings
from tests.e2e.jobs import Task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task.make(tmp_path_factory.mktemp("run"))


def test_the_workspace_of_the_head_is_an_option(task):
    assert policy_settings(load_config(task.options("out")), 3).head_workspace_bytes == 256 << 20
    config = load_config(task.options("out", megatron__head_workspace_mib=3))
    assert policy_settings(config, 3).head_workspace_bytes == 3 << 20


def test_the_policy_is_trained_before_the_run_ends(task):
    gae = {"algo__advantage__estimator": "gae", "critic__num_gpus_per_node": 2}
    config = load_config(task.options("out", **gae, critic__freezing_steps=1))
    check_frozen_steps(config, 3)
    with pytest.raises(ValueError, match=r"never trained: got 1 \(the first 2 steps\) and 2 steps"):
        check_frozen_steps(config, 2)
    check_frozen_steps(load_config(task.options("out")), 1)
