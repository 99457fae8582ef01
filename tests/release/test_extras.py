"""Each extra alone brings nothing of another part, and its bill of materials is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.closure import FOREIGN, PARTS, Part, closure
from scripts.sbom import UNKNOWN, bom, licence_table, write


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_nothing_of_another_part(extra: str) -> None:
    assert closure(extra).foreign() == set()


def test_the_closure_follows_requirements_of_requirements() -> None:
    """And extras of requirements: peft comes with `trl[peft]`."""
    assert {"anyio", "h11", "botocore"} <= set(closure("proxy").requires)
    assert {"peft", "torch", "transformers"} <= set(closure("trl").requires)


def test_what_belongs_to_another_part_would_be_seen() -> None:
    part = Part("proxy", {**closure("proxy").requires, "torch": set()})
    assert part.foreign() == {"torch"}
    assert set(FOREIGN) == set(PARTS)


def test_every_bill_of_materials_is_valid_cyclonedx(tmp_path: Path) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    files = write(tmp_path)
    documents = [path for path in files if path.suffix == ".json"]
    assert len(documents) == len(PARTS)
    for path in documents:
        assert validator.validate_str(path.read_text()) is None, path.name


def test_a_bill_of_materials_names_each_distribution_of_the_closure() -> None:
    part = closure("proxy")
    assert {component.name for component in bom(part).components} == set(part.requires)


def test_every_licence_is_known() -> None:
    table = licence_table([closure(extra) for extra in PARTS])
    assert UNKNOWN not in table, [row for row in table.splitlines() if UNKNOWN in row]
