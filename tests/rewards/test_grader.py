from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.rewards import HttpReward, RewardPool, RewardSettings, open_grader
from tests.patience import PATIENCE_S


def test_a_python_file_gives_a_pool(tmp_path: Path) -> None:
    assert isinstance(open_grader(RewardSettings(remote_url=str(tmp_path / "reward.py"))), RewardPool)


@pytest.mark.parametrize("url", ["http://a/x,https://b/y", ("http://a/x", " https://b/y")])
def test_addresses_give_the_http_grader(url: str | tuple[str, ...]) -> None:
    settings = RewardSettings(remote_url=url)
    assert settings.addresses == ("http://a/x", "https://b/y")
    assert isinstance(open_grader(settings), HttpReward)


@pytest.mark.parametrize("url", ["reward.txt", "a.py,b.py", "http://a,b.py", "ftp://a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--reward.remote_url must be one Python file"):
        open_grader(RewardSettings(remote_url=url))


def test_settings_name_the_option_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="--reward.remote_url"):
        RewardSettings(remote_url=" , ")
    with pytest.raises(ValueError, match="--reward.failure_value"):
        RewardSettings(remote_url="r.py", failure_value=math.nan)


def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, openrlhf_ext.rewards, openrlhf_ext.rewards.pool\n"
        "print({'torch', 'numpy', 'aiohttp', 'openrlhf', 'ray'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert output.stdout.strip() == "set()"
