"""The units, as systemd itself reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from bucket_lora_proxy.config_sources import parse_config

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd's own checker is not installed"
)
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    assert len(UNITS) == 3
    for unit in UNITS:
        # The programs of /opt/bucket-lora are not installed here; everything else is checked.
        text = re.sub(r"/opt/bucket-lora/bin/\S+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.glob("*.service"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "bucket-lora" in line]
    assert not complaints
    assert done.returncode == 0, done.stderr


def test_the_proxys_settings_are_understood() -> None:
    config = parse_config(["--config", str(FOLDER / "proxy.toml")], {})
    settings = tomllib.loads((FOLDER / "proxy.toml").read_text())
    assert [origin.url for origin in config.replicas] == settings["replica"]


def test_every_unit_gives_its_process_time_to_end() -> None:
    for unit in UNITS:
        (limit,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        assert int(limit) > 25 if "trainer" in unit.name else int(limit) > 30


def test_no_secret_is_on_a_command_line() -> None:
    for unit in UNITS:
        assert "EnvironmentFile=" in unit.read_text()
        assert not re.search(r"Exec.*(TOKEN|KEY|SECRET)", unit.read_text())
