"""For how long the engine loop stands still while an adapter is loaded, before and after.

    python benchmarks/plugin_loop_blocked.py

"vLLM alone" is ``add_lora`` as it is: it parses the files, merges packed modules and fills a slot,
all between two steps. "With the plugin" a thread of the worker has parsed and merged before, and
``add_lora`` fills the slot. Both are timed in turns, in one process, around the same call; files
are in page cache. Median of ``ROUNDS`` and the largest, in ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RANKS = (1, 8, 16, 64)
ROUNDS = 9
TOKENIZER = {"vocab_size": 8192, "tie_word_embeddings": True, "max_position_embeddings": 512}
SHAPES = {
    "2 layers, hidden 128": (2, 128, 256, 4, 2),
    "12 layers, hidden 512": (12, 512, 1408, 8, 4),
    "24 layers, hidden 896 (0.5B)": (24, 896, 4864, 14, 2),
    "28 layers, hidden 1536 (1.5B)": (28, 1536, 8960, 12, 2),
}
"""Layers, hidden size, intermediate size, heads, key-value heads."""
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def main() -> None:
    print(
        "| model shape | rank | bytes | vLLM alone, ms (largest) | with the plugin, ms (largest) |"
    )
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        subprocess.run(
            [sys.executable, __file__, "--one", shape],
            env={**os.environ, **ENV, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
            check=True,
        )


def one(shape: str) -> None:
    from vllm import LLM

    from vllm_bucket_lora.worker import install

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base = Path(folder) / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(config(*SHAPES[shape])))
        llm = LLM(
            str(base), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            enforce_eager=True, enable_lora=True, max_lora_rank=max(RANKS), max_loras=2,
            max_model_len=256, max_num_batched_tokens=4096,
        )  # fmt: skip
        install()
        for rank in RANKS:
            path = adapter(Path(folder) / f"r{rank}", rank, *SHAPES[shape])
            size = (path / "adapter_model.safetensors").stat().st_size
            alone, ours = measure(llm, path)
            print(f"| {shape} | {rank} | {size:,} | {told(alone)} | {told(ours)} |", flush=True)


def measure(llm: Any, path: Path) -> tuple[list[float], list[float]]:
    alone: list[float] = []
    ours: list[float] = []
    for number in range(1, 2 * ROUNDS + 3, 2):
        alone.append(load_s(llm, number, path))
        llm.collective_rpc("bucket_lora_prepare", args=(f"a{number + 1}", number + 1, str(path)))
        while not all(llm.collective_rpc("bucket_lora_prepared", args=(number + 1,))):
            time.sleep(0.002)
        ours.append(load_s(llm, number + 1, path))
    return alone[1:], ours[1:]  # the first one warms up


def load_s(llm: Any, number: int, path: Path) -> float:
    from vllm.lora.request import LoRARequest

    request = LoRARequest(f"a{number}", number, str(path))
    started = time.perf_counter()
    llm.llm_engine.add_lora(request)
    taken = time.perf_counter() - started
    llm.llm_engine.remove_lora(number)
    return taken


def told(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ({1000 * max(seconds):.1f})"


def config(layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **TOKENIZER, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "use_sliding_window": False,
    }  # fmt: skip


def adapter(
    path: Path, rank: int, layers: int, hidden: int, inner: int, heads: int, kv: int
) -> Path:
    """An adapter on all linear layers, in bfloat16, as PEFT stores it."""
    import torch
    from safetensors.torch import save_file

    narrow = hidden // heads * kv
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    tensors = {}
    for layer in range(layers):
        for module, (wide_in, wide_out) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (rank, wide_in)), ("B", (wide_out, rank))):
                tensors[f"{name}.lora_{side}.weight"] = torch.randn(shape, dtype=torch.bfloat16)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in sizes],
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    else:
        main()
