"""One number, one adapter, whichever process asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_bucket_lora.claims import NumberClaims


def test_a_number_belongs_to_the_first_until_it_is_released(tmp_path: Path) -> None:
    one, other = NumberClaims(tmp_path / "numbers"), NumberClaims(tmp_path / "numbers")
    assert one.claim(7, "run-v1") == "run-v1"
    assert one.claim(7, "run-v1") == "run-v1"
    assert other.claim(7, "run-v4097") == "run-v1"
    assert other.claim(8, "run-v2") == "run-v2"
    one.release(7)
    assert one.holder(7) is None
    assert other.claim(7, "run-v4097") == "run-v4097"
    assert sorted(path.name for path in (tmp_path / "numbers").iterdir()) == ["7", "8"]


def test_of_many_that_ask_at_once_one_gets_it(tmp_path: Path) -> None:
    claims = NumberClaims(tmp_path)
    names = [f"run-{number}-v1" for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for number in range(50):
            answers = set(pool.map(lambda name, number=number: claims.claim(number, name), names))
            assert len(answers) == 1
