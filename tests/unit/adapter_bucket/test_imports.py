"""The contract package stands alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_no_heavy_package_is_imported() -> None:
    script = """
        import importlib, pkgutil, sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {
                    "torch", "trl", "vllm", "starlette", "transformers", "peft", "numpy",
                    "safetensors", "trl_async_bucket", "vllm_bucket_lora", "bucket_lora_proxy",
                }:
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Refuse())
        import adapter_bucket
        for module in pkgutil.iter_modules(adapter_bucket.__path__):
            importlib.import_module(f"adapter_bucket.{module.name}")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
