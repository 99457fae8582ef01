"""Each part imports nothing of what only the other parts need."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TRAINER_ONLY = ["torch", "trl", "peft", "transformers", "datasets", "accelerate"]
_SERVER_ONLY = ["starlette", "uvicorn", "fastapi"]


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            ["adapter_bucket.cli", "adapter_bucket.publish", "adapter_bucket.fetch"],
            [*_TRAINER_ONLY, *_SERVER_ONLY, "vllm"],
        ),
        (["trl_async_bucket"], [*_TRAINER_ONLY, *_SERVER_ONLY, "vllm"]),
        (
            ["trl_async_bucket.publisher", "trl_async_bucket.readiness", "trl_async_bucket.checks"],
            [*_TRAINER_ONLY, *_SERVER_ONLY, "vllm"],
        ),
        (
            ["trl_async_bucket.launch.__main__", "trl_async_bucket.launch.hf_jobs"],
            [*_TRAINER_ONLY, *_SERVER_ONLY, "vllm", "boto3"],
        ),
        (["vllm_bucket_lora", "vllm_bucket_lora.plugin"], ["trl", "peft", "torch", "vllm"]),
        (["bucket_lora_proxy.__main__"], [*_TRAINER_ONLY, "vllm", "boto3", "fastapi"]),
    ],
    ids=lambda value: value[0],
)
def test_a_part_runs_without_what_it_does_not_need(
    modules: list[str], forbidden: list[str]
) -> None:
    """In a process where the forbidden packages cannot be imported at all."""
    program = (
        "import importlib, sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {forbidden!r}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-1500:]
