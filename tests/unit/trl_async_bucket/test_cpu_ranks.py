"""What resuming on several CPU ranks rests on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trl_async_bucket.compat import cpu_ranks


@pytest.mark.parametrize("installed", [False, True])
def test_a_numbered_cpu_can_be_loaded_to_and_torch_alone_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Also in a process that trained on a CPU before, as other tests do."""
    if installed:
        cpu_ranks.let_torch_load_to_numbered_cpus()
    registry = torch.serialization._package_registry
    monkeypatch.setattr(
        torch.serialization,
        "_package_registry",
        [entry for entry in registry if cpu_ranks._stay_on_cpu not in entry],
    )
    monkeypatch.setattr(cpu_ranks, "_installed", False)
    file, place = tmp_path / "state.pt", torch.device("cpu", 0)
    torch.save({"step": torch.ones(2)}, file)
    with pytest.raises(RuntimeError, match="restore data location"):
        torch.load(file, map_location=place, weights_only=True)  # else compat.cpu_ranks can go
    cpu_ranks.let_torch_load_to_numbered_cpus()
    cpu_ranks.let_torch_load_to_numbered_cpus()
    loaded = torch.load(file, map_location=place, weights_only=True)
    assert torch.equal(loaded["step"], torch.ones(2))
