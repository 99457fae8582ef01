"""The Compose file against the Compose specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "compose.yaml"


def services() -> dict[str, Any]:
    found = yaml.safe_load(FILE.read_text())["services"]
    assert isinstance(found, dict)
    return found


def test_the_file_is_valid() -> None:
    spec = PyCompose.from_yaml(FILE.read_text()).to_dict()
    assert set(spec["services"]) == {"replica", "proxy", "trainer"}


def test_an_unknown_key_would_be_seen() -> None:
    broken = FILE.read_text().replace("stop_grace_period: 60s", "stop_grace_time: 60s")
    with pytest.raises(Exception, match="stop_grace_time"):
        PyCompose.from_yaml(broken)


def test_everything_listens_on_loopback_only() -> None:
    for name, service in services().items():
        assert service["network_mode"] == "host", name
        hosts = [part for part in service["command"] if str(part).startswith("--host=")]
        assert hosts in ([], ["--host=127.0.0.1"])
        assert bool(hosts) == (name != "trainer")


def test_what_is_mounted_and_built_exists() -> None:
    document = yaml.safe_load(FILE.read_text())
    for service in services().values():
        assert (FILE.parents[2] / service["build"]["dockerfile"]).is_file()
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists()
            else:
                assert source in document["volumes"]
