"""Which adapters are refused before they travel."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.adapter_files import (
    _all_finite,
    _all_finite_by_bytes,
    adapter_faults,
    canonical_config,
)
from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from adapter_bucket.safetensors_header import parse_header
from tests.adapters import (
    BASE,
    adapter_config,
    adapter_file,
    adapter_tensors,
    safetensors_file,
    version,
)

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def faults(
    tensors: dict[str, Any], *, config: dict[str, Any] | None = None, **options: Any
) -> list[str]:
    given = {"dtype": "bfloat16", "rank": 4, "trained": True, **options}
    return adapter_faults(safetensors_file(tensors), config or adapter_config(), **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_good_adapter_has_no_faults(dtype: str) -> None:
    assert faults(adapter_tensors(1, dtype=dtype), dtype=dtype) == []


def test_a_file_of_the_safetensors_package_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the trl extra")
    from safetensors.torch import save

    tensors = {
        f"{FIRST}.lora_A.weight": torch.ones(4, 8, dtype=torch.bfloat16),
        f"{FIRST}.lora_B.weight": torch.ones(8, 4, dtype=torch.bfloat16),
    }
    data = save(tensors, metadata={"format": "pt"})
    assert {tensor.name for tensor in parse_header(data)} == set(tensors)
    config = adapter_config(targets=("q_proj",))
    assert adapter_faults(data, config, dtype="bfloat16", rank=4, trained=True) == []


def test_an_empty_file_as_a_sharded_save_leaves_it_is_refused() -> None:
    assert "no tensors" in faults({})[0]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_cut_file_is_refused(cut: int) -> None:
    data = adapter_file(1)[:cut]
    assert adapter_faults(data, adapter_config(), dtype="bfloat16", rank=4, trained=True)


def test_appended_bytes_are_refused() -> None:
    with pytest.raises(IntegrityError, match="appended"):
        parse_header(adapter_file(1) + b"x")


@pytest.mark.parametrize("segment", ["_orig_mod", "_fsdp_wrapped_module", "default"])
def test_wrapper_segments_in_names_are_refused(segment: str) -> None:
    tensors = adapter_tensors(1)
    name = f"{FIRST}.lora_A.weight"
    tensors[name.replace("lora_A", f"lora_A.{segment}")] = tensors.pop(name)
    assert "wrapper" in faults(tensors)[0]


def test_a_missing_peft_prefix_is_refused() -> None:
    tensors = {
        name.removeprefix("base_model.model."): value for name, value in adapter_tensors(1).items()
    }
    assert "base_model.model.<module>" in faults(tensors)[0]


def test_a_missing_half_is_refused() -> None:
    tensors = adapter_tensors(1)
    del tensors[f"{FIRST}.lora_B.weight"]
    assert "only one of" in faults(tensors)[0]


def test_a_rank_that_is_not_the_configs_is_refused() -> None:
    assert "for rank 8" in faults(adapter_tensors(1, rank=4), config=adapter_config(8))[0]
    assert "above the announced" in faults(adapter_tensors(1), rank=2)[0]
    pattern = {**adapter_config(2), "rank_pattern": {"q_proj|v_proj": 4}}
    for match_patterns in (True, False):
        assert faults(adapter_tensors(1), config=pattern, match_patterns=match_patterns) == []
    other = {**adapter_config(2), "rank_pattern": {"q_proj": 4}}
    assert "for rank 2" in faults(adapter_tensors(1), config=other, match_patterns=True)[0]


def test_a_reader_runs_no_regular_expression_of_a_writer() -> None:
    """This one takes longer than anybody lives."""
    hostile = {**adapter_config(2), "rank_pattern": {"(([a-z_]+)+)+!": 4}}
    tensors = adapter_tensors(1)
    long = {name.replace("self_attn", "a" * 60): tensor for name, tensor in tensors.items()}
    assert long != tensors
    assert faults(long, config=hostile) == []


def test_another_dtype_than_announced_is_refused() -> None:
    assert "not float32" in faults(adapter_tensors(1), dtype="float32")[0]


def test_tensors_and_target_modules_must_agree() -> None:
    assert "not among" in faults(adapter_tensors(1), config=adapter_config(targets=("q_proj",)))[0]
    more = adapter_config(targets=("q_proj", "v_proj", "o_proj"))
    assert "o_proj" in faults(adapter_tensors(1), config=more)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    tensors = adapter_tensors(1, dtype=dtype)
    name = f"{FIRST}.lora_A.weight"
    kind, shape, data = tensors[name]
    number = struct.pack("<e", value) if dtype == "float16" else struct.pack("<f", value)
    number = number[2:] if dtype == "bfloat16" else number
    tensors[name] = (kind, shape, data[: -len(number)] + number)
    assert "diverged" in faults(tensors, dtype=dtype)[0]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_finite_number_passes(value: float) -> None:
    tensors = adapter_tensors(1, layers=1, width=4, dtype="float32")
    name = f"{FIRST}.lora_A.weight"
    kind, shape, data = tensors[name]
    tensors[name] = (kind, shape, struct.pack("<f", value) + data[4:])
    assert faults(tensors, dtype="float32") == []


@given(st.binary(min_size=8, max_size=8), st.sampled_from(["F32", "F16", "BF16"]))
def test_numpy_and_plain_python_agree_on_what_is_finite(data: bytes, dtype: str) -> None:
    view = memoryview(data)
    assert _all_finite(view, dtype) == _all_finite_by_bytes(view, dtype)


def test_an_untrained_b_is_refused_after_the_first_step_only() -> None:
    tensors = {
        name: (kind, shape, b"\0" * len(data) if "lora_B" in name else data)
        for name, (kind, shape, data) in adapter_tensors(1).items()
    }
    assert faults(tensors, trained=False) == []
    assert "no effect" in faults(tensors, trained=True)[0]


def test_a_check_takes_less_than_a_look_at_every_byte_in_python() -> None:
    """5 MB take about 2 ms, and `sum`, which looks at one byte after another, ten times as long."""
    data = adapter_file(1, rank=16, layers=24, width=1700)
    config = adapter_config(16)
    shares = []
    for _ in range(5):
        started = time.thread_time()
        assert adapter_faults(data, config, dtype="bfloat16", rank=16, trained=True) == []
        checked = time.thread_time()
        sum(data)
        shares.append((checked - started) / (time.thread_time() - checked))
    assert min(shares) < 1, shares


def test_the_writer_refuses_before_anything_is_uploaded() -> None:
    store = MemoryStore()
    writer = RunWriter.claim(store, "r", base_model=BASE, window=2, writer_id="w")
    with pytest.raises(IntegrityError, match="not published"):
        writer.publish(1, **{**version(1), "weights": b"cut"})
    with pytest.raises(ConfigError, match="use_dora"):
        writer.publish(
            1, **{**version(1), "adapter_config": {**adapter_config(), "use_dora": True}}
        )
    with pytest.raises(ConfigError, match="rank"):
        writer.publish(1, **{**version(1), "rank": 0})
    assert list(store.list("runs/r/adapters/")) == []
    assert writer.manifest.latest == 0


@pytest.mark.parametrize("value", [{1, 2}, math.nan, object(), "x" * 300_000])
def test_a_config_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        canonical_config({"field": value})


@given(st.binary(max_size=300))
def test_a_header_of_arbitrary_bytes_is_an_integrity_error(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_header(struct.pack("<Q", len(data)) + data + b"x")


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 5000 + b"]}}",
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b'{"a":null}',
        b'{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}',
    ],
)
def test_hostile_headers_are_integrity_errors(header: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_header(struct.pack("<Q", len(header)) + header)
