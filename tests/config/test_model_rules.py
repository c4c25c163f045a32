"""Rules about models: any layout of any model, on facts as they are read from config.json."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config.files import ModelFacts
from openrlhf_ext.config.model_rules import _divisible, _heads_divisible
from openrlhf_ext.config.sections import Megatron

sizes = st.integers(1, 12)


def model(**changes: int) -> ModelFacts:
    facts = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 512, "vocab_size": 101}
    return ModelFacts(model_type="qwen2", max_positions=1024, has_weights=True, **(facts | changes))


def found(facts: ModelFacts, **layout: int) -> list[str]:
    return [v.message for v in _divisible("actor.model_name_or_path", facts, "megatron", Megatron(**layout))]


@given(heads=sizes, groups=sizes, layers=sizes, tp=sizes, pp=sizes)
def test_the_model_can_be_cut(heads, groups, layers, tp, pp):
    facts = model(num_heads=heads, num_kv_heads=groups, num_layers=layers, ffn_hidden_size=tp)
    broken = (heads % tp != 0) + (groups % tp != 0 and tp % groups != 0) + (layers % pp != 0)
    assert len(found(facts, tensor_parallel_size=tp, pipeline_parallel_size=pp)) == broken


def test_every_chunk_has_layers():
    def chunks(vp: int) -> list[str]:
        return found(model(num_layers=8), pipeline_parallel_size=2, virtual_pipeline_size=vp)

    assert chunks(2) == chunks(4) == []
    (message,) = chunks(3)
    assert "got 2 * 3" in message and "use a megatron.virtual_pipeline_size of 1, 2, 4" in message


def test_an_engine_may_replicate_key_value_heads_but_not_split_them_unevenly():
    def broken(size: int, kv_heads: int) -> int:
        facts = model(num_heads=24, num_kv_heads=kv_heads)
        return len(list(_heads_divisible("actor.model_name_or_path", facts, "vllm.tensor_parallel_size", size)))

    assert (broken(4, 8), broken(8, 4), broken(6, 4), broken(5, 5)) == (0, 0, 1, 1)
