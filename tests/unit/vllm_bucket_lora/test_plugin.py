"""What the general plugin decides before anything of vLLM is loaded."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from adapter_bucket.errors import ConfigError, UnsupportedUpstream
from vllm_bucket_lora import plugin


def test_a_vllm_without_endpoint_plugins_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.25 and older; tried with 0.25.1 as well."""
    older = ModuleType("vllm.plugins")
    package = ModuleType("vllm")
    package.plugins = older  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.plugins", older)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.25.1")
    with pytest.raises(UnsupportedUpstream, match=r"vLLM 0\.25\.1 has no endpoint.*install"):
        plugin._check_server(Namespace(enable_lora=True))


@pytest.mark.parametrize("value", ["1", "true", " True "])
def test_a_server_that_takes_any_model_name_for_the_base_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    package = ModuleType("vllm")
    package.plugins = ModuleType("vllm.plugins")  # type: ignore[attr-defined]
    package.plugins.load_endpoint_plugins = None
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.plugins", package.plugins)
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "0")
    plugin._check_server(Namespace(enable_lora=True))
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", value)
    with pytest.raises(ConfigError, match="unset VLLM_SKIP_MODEL_NAME_VALIDATION"):
        plugin._check_server(Namespace(enable_lora=True))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("mine", "mine,bucket-lora"),
        ("bucket-lora,mine", "bucket-lora,mine"),
        ("", ",bucket-lora"),
    ],
)
def test_what_people_put_into_vllm_plugins_stays_there(
    monkeypatch: pytest.MonkeyPatch, given: str, left: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", given)
    plugin.allow_endpoint_plugin()
    assert os.environ["VLLM_PLUGINS"] == left


def test_the_worker_side_is_installed_only_where_a_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core", raising=False)
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base", raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert not plugin._is_engine_process()
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", ModuleType("core"))
    assert plugin._is_engine_process()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    assert not plugin._is_engine_process()


@pytest.mark.parametrize(("method", "forks"), [("fork", True), ("spawn", False), (None, True)])
def test_the_worker_side_is_installed_where_engines_will_be_forked_from(
    monkeypatch: pytest.MonkeyPatch, method: str | None, forks: bool
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    if method is not None:
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    assert plugin._forks_engines() is forks
