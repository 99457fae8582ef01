"""What would be uploaded is whole, and says what pyproject.toml and the changelog say."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

import trl_async_bucket
from scripts.release import (
    ROOT,
    Distribution,
    ReleaseError,
    build,
    check_metadata,
    check_wheel,
    version,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    return build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_every_file_of_the_packages(built: Distribution) -> None:
    check_wheel(built.wheel)


def test_the_index_would_take_both_files(built: Distribution) -> None:
    check_metadata(built)


def test_the_sdist_holds_no_tests_and_no_benchmarks(built: Distribution) -> None:
    with tarfile.open(built.sdist) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert not folders & {"tests", "benchmarks", "docs", "demo"}
    assert {"adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "proxy"} <= folders


@pytest.mark.parametrize(
    "lost", ["trl_async_bucket/compat/grpo.py", "bucket_lora_proxy/py.typed", "dist-info/licenses"]
)
def test_a_wheel_that_lost_a_file_is_refused(
    built: Distribution, tmp_path: Path, lost: str
) -> None:
    broken = tmp_path / built.wheel.name
    with zipfile.ZipFile(built.wheel) as whole, zipfile.ZipFile(broken, "w") as rest:
        for name in whole.namelist():
            if lost not in name:
                rest.writestr(name, whole.read(name))
    with pytest.raises(ReleaseError, match="lacks"):
        check_wheel(broken)


def test_the_changelog_has_a_section_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(version())}\]", text, re.MULTILINE)


def test_the_installed_version_is_the_one_of_the_tree() -> None:
    """Fails where .venv was set up before the version changed: run `make setup`."""
    assert trl_async_bucket.__version__ == version()
