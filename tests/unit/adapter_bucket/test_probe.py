"""The probe: what it must hold, and what an engine must show."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.manifest import decode, encode
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.probe import (
    MAX_TOKENS,
    TOLERANCES,
    Probe,
    default_tolerance,
    make_probe,
    probe_faults,
)
from adapter_bucket.publish import RunWriter
from tests.adapters import BASE, version

TOKENS = [5, 6, 7]
OWN, PLAIN = [-1.0, -2.0], [-1.0, -4.0]
PROBE = make_probe(TOKENS, OWN, dtype="float32", base_logprobs=PLAIN)


def document() -> dict[str, Any]:
    return PROBE.model_dump()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", [5]),
        ("token_ids", [1] * (MAX_TOKENS + 1)),
        ("token_ids", [5, -1, 7]),
        ("token_ids", [5, 6.5, 7]),
        ("token_ids", [5, True, 7]),
        ("logprobs", [-1.0]),
        ("logprobs", [-1.0, 0.5]),
        ("logprobs", [-1.0, math.nan]),
        ("logprobs", [-1.0, -math.inf]),
        ("logprobs", [-1.0, "-2"]),
        ("base_logprobs", [-1.0]),
        ("tolerance", 0.0),
        ("tolerance", math.inf),
        ("effect", -1.0),
        ("effect", 2.5),
    ],
)
def test_a_probe_that_cannot_be_meant_is_not_made(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Probe.model_validate({**document(), field: value})


def test_making_a_probe_says_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="finite number"):
        make_probe(TOKENS, [-1.0, math.nan], dtype="float32")
    with pytest.raises(ConfigError, match="a probe of 3 tokens"):
        make_probe(TOKENS, OWN, dtype="float32", base_logprobs=[-1.0])
    with pytest.raises(ConfigError, match=r"no tolerance was measured for dtype 'fp8'.*bfloat16"):
        make_probe(TOKENS, OWN, dtype="fp8")


def test_an_effect_is_asked_for_only_where_rounding_cannot_hide_it() -> None:
    assert PROBE.effect == 1.0  # half of what the trainer sees
    slight = [-1.0, -2.0 + 1.9 * default_tolerance("bfloat16")]
    assert make_probe(TOKENS, OWN, dtype="bfloat16", base_logprobs=slight).effect == 0.0
    assert make_probe(TOKENS, OWN, dtype="bfloat16").effect == 0.0


def test_an_engine_that_computes_the_same_has_no_faults() -> None:
    assert probe_faults(PROBE, OWN, PLAIN) == []
    near = [value + 0.9 * PROBE.tolerance for value in OWN]
    assert probe_faults(PROBE, near, PLAIN) == []
    assert probe_faults(PROBE, OWN) == []


def test_a_difference_names_the_token_and_both_values() -> None:
    (fault,) = probe_faults(PROBE, [-1.0, -2.5], PLAIN)
    assert "with the adapter" in fault
    assert "token 2 is -2.5000 here and -2.0000 at the trainer" in fault
    assert "0.01 nats" in fault


def test_an_engine_that_answers_as_the_base_model_is_found_out() -> None:
    faults = probe_faults(PROBE, PLAIN, PLAIN)
    assert len(faults) == 2
    assert "does not apply it" in faults[1]


def test_the_effect_is_asked_for_also_where_the_tolerance_is_wide() -> None:
    wide = PROBE.model_copy(update={"tolerance": 5.0})
    (fault,) = probe_faults(wide, PLAIN, PLAIN)
    assert "changes no log-probability by more than 0 nats, and 1 are expected" in fault


def test_another_base_model_is_told_apart_from_another_adapter() -> None:
    (fault,) = probe_faults(PROBE, OWN, [-1.5, -4.5])
    assert "without the adapter" in fault
    assert "not the base model" in fault


@pytest.mark.parametrize("broken", [[math.nan, -2.0], [-1.0, -math.inf], [-1.0], []])
def test_what_is_no_number_for_every_token_is_a_fault(broken: list[float]) -> None:
    assert probe_faults(PROBE, broken, PLAIN)
    assert probe_faults(PROBE, OWN, broken)


logprob = st.floats(min_value=-50, max_value=0)


@given(
    values=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=20),
    noise=st.floats(min_value=-1, max_value=1),
    dtype=st.sampled_from(sorted(TOLERANCES)),
)
def test_a_made_probe_passes_what_the_trainer_saw_within_the_tolerance(
    values: list[tuple[float, float]], noise: float, dtype: str
) -> None:
    own, plain = [v[0] for v in values], [v[1] for v in values]
    probe = make_probe(range(len(values) + 1), own, dtype=dtype, base_logprobs=plain)
    moved = noise * 0.49 * probe.tolerance
    assert probe_faults(probe, [v + moved for v in own], [v - moved for v in plain]) == []


def test_a_published_probe_comes_back_as_it_was() -> None:
    writer = RunWriter.claim(MemoryStore(), "r", base_model=BASE, window=2, writer_id="w")
    entry = writer.publish(1, **version(1), probe=PROBE)
    assert entry.probe == PROBE
    assert decode(encode(writer.manifest), run_id="r").versions[0].probe == PROBE


def test_a_manifest_without_the_field_is_read_as_ever() -> None:
    writer = RunWriter.claim(MemoryStore(), "r", base_model=BASE, window=2, writer_id="w")
    writer.publish(1, **version(1))
    data = json.loads(encode(writer.manifest))
    del data["versions"][0]["probe"]
    assert decode(json.dumps(data).encode(), run_id="r").versions[0].probe is None


def test_a_newer_writers_fields_in_a_probe_are_kept() -> None:
    newer = Probe.model_validate({**document(), "images": ["x"]})
    assert newer.model_dump()["images"] == ["x"]


def test_a_malformed_probe_makes_the_manifest_unbelievable() -> None:
    writer = RunWriter.claim(MemoryStore(), "r", base_model=BASE, window=2, writer_id="w")
    writer.publish(1, **version(1), probe=PROBE)
    data = json.loads(encode(writer.manifest))
    data["versions"][0]["probe"]["logprobs"] = [-1.0]
    with pytest.raises(IntegrityError, match="probe"):
        decode(json.dumps(data).encode(), run_id="r")
