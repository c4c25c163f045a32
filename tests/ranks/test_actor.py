from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from openrlhf_ext.ranks.actor import RankActor
from tests.patience import PATIENCE_S

_IMPORTS = """
import sys
from openrlhf_ext import patches
patches.apply()
from openrlhf_ext.ranks import auxiliary, policy
print(sorted({name.partition(".")[0] for name in sys.modules} & {"openrlhf", "vllm", "deepspeed", "transformers"}))
print([name for name in sys.modules if name.startswith(("openrlhf_ext.driver", "openrlhf_ext.config"))])
"""


def test_ranks_import_neither_openrlhf_and_what_it_brings_nor_the_driver():
    found = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert found.stdout.split() == ["[]", "[]"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", raising=False)


def _listening() -> list[tuple[str, int]]:
    seen = psutil.Process().net_connections("tcp")
    return [tuple(one.laddr) for one in seen if one.status == psutil.CONN_LISTEN]


def test_rank_0_says_where_to_meet_and_the_others_go_there():
    # servers of earlier tests may live on in this process, one of them at 127.0.0.1 with the very
    # port that the kernel gives out next for the node's own address (seen once)
    before = _listening()
    first = RankActor(2, 0, None, None)  # its store lives as long as it does
    address, port = first.get_master_addr_port()
    assert os.environ["MASTER_ADDR"] == address and 0 < int(os.environ["MASTER_PORT"]) == port
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (
        "0",
        "0",
        "2",
    )

    assert [seen for seen in _listening() if seen[1] == port and seen not in before] == [
        (address, port)
    ], "at the node's address, and at no other"

    assert RankActor(2, 1, address, port).get_master_addr_port() == (address, port)
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("1", str(port))


def test_the_first_rank_of_a_replica_answers_for_it():
    class Doubler(RankActor):
        def double(self, value: int) -> int:
            return 2 * value

    actor = Doubler(1, 0, "host", 1)
    assert actor.for_replica("double", 2) == 4
    actor.is_first_of_replica = False  # its copies of the answers would all go to the driver
    assert actor.for_replica("double", 2) is None
