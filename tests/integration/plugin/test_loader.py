"""Loading through vLLM's interfaces, with an engine client that only records."""

from __future__ import annotations

import asyncio
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapter_bucket.errors import StoreUnavailable
from vllm_bucket_lora.claims import NumberClaims
from vllm_bucket_lora.ports import LoadRefused
from vllm_bucket_lora.worker import layers_elsewhere

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM meets deprecations inside torch
    import torch
    from vllm.model_executor.models.utils import PPMissingLayer

    from vllm_bucket_lora.engine import PREPARE_MIN_BYTES, VllmLoader, stable_id

pytestmark = pytest.mark.slow


class FakeClient:
    """The part of vLLM's engine client that the loader uses."""

    def __init__(self, *, fails: str | None = None, added: bool = True) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, bool | str] = {}
        """What the second worker answers."""
        self.keeps = False
        """Whether it fails to remove an adapter."""
        self.output_processor = SimpleNamespace(request_states={})
        self._fails = fails
        self._added = added

    async def add_lora(self, request: Any) -> bool:
        self.calls.append(f"add {request.lora_name}")
        if self._fails:
            raise ValueError(self._fails)
        return self._added

    async def remove_lora(self, number: int) -> bool:
        self.calls.append("remove")
        if self.keeps:
            raise RuntimeError("busy")
        return True

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bool | str]:
        self.calls.append(method)
        return [True, self.answers.get(method, True)]


def models(**requests: Any) -> Any:
    return SimpleNamespace(
        lora_requests=dict(requests),
        lora_resolver_lock=defaultdict(asyncio.Lock),
        is_base_model=lambda name: name == "base-v1",
    )


def loader_for(client: FakeClient, table: Any, adapter: Path) -> VllmLoader:
    return VllmLoader(client, table, NumberClaims(adapter.parent / "numbers"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"x")
    return path


def test_the_number_of_an_adapter_follows_from_its_name_alone() -> None:
    assert stable_id("run-v1") == 1798209537
    numbers = {stable_id(f"run-v{version}") for version in range(4096)}
    assert len(numbers) == 4096
    assert stable_id("other-v1") not in numbers


def test_the_number_of_an_adapter_fits_into_32_bits() -> None:
    """vLLM's V2 model runner keeps it in one: a larger number ends the engine."""
    names = [f"run-{run}-v{10**run}" for run in range(10)]
    assert all(2**30 <= stable_id(name) < 2**31 for name in [*names, "no-version"])


def test_two_adapters_of_one_number_are_not_loaded_together(adapter: Path) -> None:
    async def scenario() -> None:
        table = models()
        client = FakeClient()
        loader = loader_for(client, table, adapter)
        await loader.load("run-v1", adapter, None)
        twin = f"run-v{1 + 4096}"
        assert stable_id(twin) == stable_id("run-v1")
        with pytest.raises(LoadRefused, match="run-v1, which is loaded"):
            await loader.load(twin, adapter, None)
        assert twin not in table.lora_requests
        await loader.remove(twin)
        assert "remove" not in client.calls, "that would take run-v1 away"
        await loader.forget("run-v1")
        await loader.remove("run-v1")
        await loader.load(twin, adapter, None)

    asyncio.run(scenario())


def test_two_processes_do_not_load_two_adapters_of_one_number(adapter: Path) -> None:
    async def scenario() -> None:
        table, others = models(), models()
        client = FakeClient()
        one = loader_for(client, table, adapter)
        other = loader_for(client, others, adapter)
        twin = f"run-v{1 + 4096}"
        await one.load("run-v1", adapter, None)
        await other.load("run-v1", adapter, None)
        with pytest.raises(LoadRefused, match="run-v1, which is loaded"):
            await other.load(twin, adapter, None)
        await one.forget("run-v1")  # and leaves the engine to the one that goes last
        await other.forget("run-v1")
        await other.remove("run-v1")
        for loader in (one, other):
            await loader.load(twin, adapter, None)

    asyncio.run(scenario())


def test_the_number_of_an_adapter_that_the_engine_may_still_have_is_not_given_away(
    adapter: Path,
) -> None:
    async def scenario() -> None:
        client = FakeClient()
        loader = loader_for(client, models(), adapter)
        await loader.load("run-v1", adapter, None)
        await loader.forget("run-v1")
        client.keeps = True
        await loader.remove("run-v1")
        with pytest.raises(LoadRefused, match="run-v1, which is loaded"):
            await loader.load(f"run-v{1 + 4096}", adapter, None)
        await loader.load("run-v1", adapter, None)

    asyncio.run(scenario())


def test_nothing_stays_of_an_adapter_in_a_process_that_is_done_with_it(adapter: Path) -> None:
    async def scenario() -> None:
        table = models()
        loader = loader_for(FakeClient(), table, adapter)
        await loader.load("run-v1", adapter, None)
        await loader.forget("run-v1")
        loader.tidy("run-v1")  # and another process removes it
        assert not table.lora_resolver_lock
        assert not table.lora_requests

    asyncio.run(scenario())


def test_a_loaded_adapter_is_registered_and_a_forgotten_one_is_not(adapter: Path) -> None:
    async def scenario() -> None:
        table = models()
        loader = loader_for(FakeClient(), table, adapter)
        await loader.load("run-v1", adapter, None)
        assert table.lora_requests["run-v1"].lora_int_id == stable_id("run-v1")
        await loader.load("run-v1", adapter, None)
        await loader.forget("run-v1")
        assert table.lora_requests == {}

    asyncio.run(scenario())


def test_large_adapters_are_read_beside_the_loop_first(adapter: Path) -> None:
    async def scenario() -> None:
        (adapter / "adapter_model.safetensors").write_bytes(b"x" * PREPARE_MIN_BYTES)
        client = FakeClient()
        await loader_for(client, models(), adapter).load("run-v1", adapter, None)
        steps = ["bucket_lora_shares", "bucket_lora_prepare", "bucket_lora_prepared", "add run-v1"]
        assert client.calls == steps

    asyncio.run(scenario())


def test_a_worker_elsewhere_has_its_copy_before_the_engine_is_asked(adapter: Path) -> None:
    async def scenario() -> None:
        client, table = FakeClient(), models()
        loader = loader_for(client, table, adapter)
        client.answers = {"bucket_lora_shares": False, "bucket_lora_prepared": "denied"}
        with pytest.raises(StoreUnavailable, match="another machine has no copy of it yet: denied"):
            await loader.load("run-v1", adapter, None)
        assert table.lora_requests == {}
        client.answers["bucket_lora_prepared"] = True
        await loader.load("run-v1", adapter, None)
        assert client.calls.count("bucket_lora_shares") == 1
        assert client.calls[-2:] == ["bucket_lora_prepared", "add run-v1"]

    asyncio.run(scenario())


def test_every_rank_has_to_have_read_the_files_and_one_that_failed_is_told(adapter: Path) -> None:
    """The second worker stands for the second half of a pipeline, or of a split model."""

    async def scenario() -> None:
        (adapter / "adapter_model.safetensors").write_bytes(b"x" * PREPARE_MIN_BYTES)
        client = FakeClient()
        client.answers = {"bucket_lora_prepared": False}
        loading = asyncio.create_task(
            loader_for(client, models(), adapter).load("run-v1", adapter, None)
        )
        await asyncio.sleep(0.05)
        assert "add run-v1" not in client.calls
        client.answers = {}
        await loading
        assert client.calls[-1] == "add run-v1"

    asyncio.run(scenario())


def test_the_layers_of_the_other_ranks_of_a_pipeline_are_known() -> None:
    here, there = torch.nn.Linear(1, 1), PPMissingLayer()
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([here, there]), "norm": there})
    assert layers_elsewhere(model) == ("layers.1.", "norm.")


@pytest.mark.parametrize(
    ("client", "said"),
    [(FakeClient(fails="rank 99"), "rank 99"), (FakeClient(added=False), "did not add")],
)
def test_what_the_engine_rejects_is_refused_and_not_registered(
    adapter: Path, client: FakeClient, said: str
) -> None:
    async def scenario() -> None:
        table = models()
        with pytest.raises(LoadRefused, match=said):
            await loader_for(client, table, adapter).load("run-v1", adapter, None)
        assert table.lora_requests == {}

    asyncio.run(scenario())


def test_names_that_others_own_are_left_alone(adapter: Path) -> None:
    async def scenario() -> None:
        table = models(**{"static-v1": "theirs"})
        loader = loader_for(FakeClient(), table, adapter)
        for name in ("static-v1", "base-v1"):
            with pytest.raises(LoadRefused, match="is taken"):
                await loader.load(name, adapter, None)
        await loader.forget("static-v1")
        assert table.lora_requests == {"static-v1": "theirs"}

    asyncio.run(scenario())


def test_requests_in_flight_are_counted_by_name(adapter: Path) -> None:
    client = FakeClient()
    client.output_processor.request_states = {
        "1": SimpleNamespace(lora_name="run-v1"),
        "2": SimpleNamespace(lora_name="run-v1"),
        "3": SimpleNamespace(lora_name=None),
    }
    loader = loader_for(client, models(), adapter)
    assert (loader.in_flight("run-v1"), loader.in_flight("run-v2")) == (2, 0)
