"""Every option of OpenRLHF's releases is known, in today's name or an earlier one."""

from __future__ import annotations

import re

import pytest

from openrlhf_ext.config import option_table
from openrlhf_ext.config.upstream import is_earlier
from tests.conformance.packages import WHEELS, unpacked

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("release", [name for name in WHEELS if name.startswith("openrlhf")])
def test_no_option_of_a_release_is_unknown(release):
    (command,) = unpacked(release).rglob("cli/train_ppo_ray.py")
    names = set(re.findall(r'"--([\w.]+)"', command.read_text()))
    assert len(names) > 100
    assert (
        sorted(name for name in names if option_table().get(name) is None and not is_earlier(name))
        == []
    )
