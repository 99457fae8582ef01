"""The accelerate config, as accelerate itself loads it."""

from __future__ import annotations

from pathlib import Path

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

FILE = Path(__file__).resolve().parents[2] / "deploy" / "accelerate" / "fsdp2.yaml"


def test_accelerate_loads_the_file() -> None:
    config = load_config_from_file(str(FILE))
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2


def test_accelerate_knows_every_setting(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    config = load_config_from_file(str(FILE))
    assert set(config.fsdp_config) <= known
