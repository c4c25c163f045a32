"""Seeds of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.seeding import RequestSeeds

token_lists = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
prompts = st.lists(token_lists.map(tuple), min_size=1, max_size=8, unique=True)


def serve(order: list[tuple[int, ...]], base_seed: int = 0, version: int = 1) -> dict[tuple[int, ...], list[int]]:
    seeds = RequestSeeds(base_seed)
    seeds.start_version(version)
    served: dict[tuple[int, ...], list[int]] = {}
    for prompt in order:
        served.setdefault(prompt, []).append(seeds.next_seed(prompt))
    return served


@given(prompts=prompts, data=st.data())
def test_seeds_do_not_depend_on_the_order_of_arrival(prompts: list[tuple[int, ...]], data: st.DataObject) -> None:
    requests = prompts * 3
    assert serve(requests) == serve(data.draw(st.permutations(requests)))


@given(prompts=prompts)
def test_all_requests_of_a_version_have_different_seeds(prompts: list[tuple[int, ...]]) -> None:
    seeds = [seed for group in serve(prompts * 4).values() for seed in group]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_other_weights_or_another_base_seed_mean_other_seeds() -> None:
    prompt = (5, 6, 7)
    assert serve([prompt]) != serve([prompt], version=2)
    assert serve([prompt]) != serve([prompt], base_seed=1)


def test_a_new_version_counts_anew() -> None:
    seeds = RequestSeeds(0)
    seeds.start_version(1)
    first = seeds.next_seed([1, 2])
    seeds.next_seed([1, 2])
    seeds.start_version(1)
    assert seeds.next_seed([1, 2]) == first


def test_forgotten_requests_do_not_change_the_seeds_of_later_ones() -> None:
    evaluated, not_evaluated = RequestSeeds(0), RequestSeeds(0)
    for seeds in (evaluated, not_evaluated):
        seeds.start_version(3)
    evaluated.next_seed([1, 2])
    evaluated.forget_requests()
    assert evaluated.next_seed([1, 2]) == not_evaluated.next_seed([1, 2])
