"""Which adapter configs are refused, and that the refusal names field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.servable import largest_rank, servable_faults

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": None,
    "use_dora": False,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def test_a_plain_adapter_has_no_faults() -> None:
    assert servable_faults(PLAIN) == []


def test_the_config_of_a_real_peft_model_has_no_faults() -> None:
    peft = pytest.importorskip("peft", reason="needs the trl extra")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]).to_dict()
    assert servable_faults(config) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("target_modules", ["q_proj", "embed_tokens"]),
        ("target_modules", ["model.lm_head"]),
        ("target_modules", "all-linear"),
        ("target_modules", []),
        ("target_modules", None),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("kasa_config", {"x": 1}),
        ("r", 0),
        ("r", True),
        ("lora_alpha", "16"),
        ("rank_pattern", {"q_proj": 16}),
        ("alpha_pattern", {"q_proj": 32}),
        ("rank_pattern", {"q_proj": -1}),
    ],
)
def test_an_unservable_field_is_named_with_its_value_and_a_remedy(field: str, value: Any) -> None:
    faults = servable_faults({**PLAIN, field: value})
    assert len(faults) == 1
    assert faults[0].startswith(f"{field} is ")
    assert ": " in faults[0]


def test_rank_pattern_with_the_same_scaling_everywhere_is_served() -> None:
    config = {**PLAIN, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 32}}
    assert servable_faults(config) == []
    assert largest_rank(config) == 16


def test_patterns_that_may_meet_in_one_module_are_the_same_in_both_fields() -> None:
    """Of q_proj, PEFT would take the rank 16 and the alpha 16 here: a scaling of its own."""
    ranks, alphas = {"q_proj": 16}, {"self_attn.q_proj": 16, "q_proj": 32}
    (fault,) = servable_faults({**PLAIN, "rank_pattern": ranks, "alpha_pattern": alphas})
    assert "the same patterns, in the same order" in fault


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    config = {**PLAIN, "use_rslora": True, "rank_pattern": {"q_proj": 32}}
    assert servable_faults({**config, "alpha_pattern": {"q_proj": 32}}) == []
    assert servable_faults({**config, "alpha_pattern": {"q_proj": 64}}) != []


def test_every_fault_is_reported_at_once() -> None:
    faults = servable_faults({**PLAIN, "use_dora": True, "bias": "all", "modules_to_save": ["x"]})
    assert len(faults) == 3


def test_a_huge_value_is_cut_in_the_text() -> None:
    (fault,) = servable_faults({**PLAIN, "modules_to_save": ["x" * 10_000_000]})
    assert len(fault) < 400


def test_largest_rank_refuses_what_is_no_rank() -> None:
    with pytest.raises(ValueError, match="positive"):
        largest_rank({"r": 8, "rank_pattern": {"q_proj": "16"}})


names = st.sampled_from(["", "q_proj", "lm_head", "LORA", "\0"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | names
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(names, scalars, max_size=3)


@given(st.dictionaries(st.sampled_from(sorted(PLAIN)), json_values))
def test_faults_never_raise_whatever_the_config_holds(config: dict[str, Any]) -> None:
    assert isinstance(servable_faults(config), list)
