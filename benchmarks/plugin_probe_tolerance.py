"""How far an engine's log-probabilities are from a trainer's, though both hold the same adapter.

    python benchmarks/plugin_probe_tolerance.py [float32 bfloat16 float16]

Real vLLM on one side, transformers and PEFT on the other; random models whose distributions are
about as sharp as a trained one's, random adapters with a strong effect, a probe of 64 tokens. The
trainer computes in the serving dtype, or in float32, or in bfloat16 with adapters in float32, as
GRPO trainers do. ``adapter_bucket.probe.TOLERANCES`` is chosen from the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RANKS = (1, 16, 64)
SHAPES = {
    "2 layers, hidden 128": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    },
    "12 layers, hidden 512": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    },
}  # fmt: skip
TOKENS = 64
SEEDS = (1, 2)
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def main() -> None:
    dtypes = sys.argv[1:] or ["float32", "bfloat16", "float16"]
    print("| model | engine | trainer | rank | mean | 99 % | largest | effect of the adapter |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in dtypes:
        for shape in SHAPES:
            subprocess.run(
                [sys.executable, __file__, "--one", dtype, shape],
                env={**os.environ, **ENV, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
                check=True,
            )


def one(dtype: str, shape: str) -> None:
    """Compare one engine with trainers, in a process of its own: an engine keeps its memory."""
    with tempfile.TemporaryDirectory() as folder:
        base = build(Path(folder) / "base", SHAPES[shape])
        adapters = {
            (rank, seed): adapter(base, Path(folder) / f"r{rank}-{seed}", rank, seed, dtype)
            for rank in RANKS
            for seed in SEEDS
        }
        tokens = probe_tokens(SHAPES[shape]["vocab_size"])
        measured = engine_logprobs(base, adapters, tokens, dtype)
        plain = measured.pop(None)
        for trainer in dict.fromkeys([(dtype, dtype), ("float32", "float32"), (dtype, "float32")]):
            for rank in RANKS:
                gaps, effects = [], []
                for seed in SEEDS:
                    truth = trainer_logprobs(base, adapters[rank, seed], tokens, *trainer)
                    own = measured[rank, seed]
                    gaps += [abs(a - b) for a, b in zip(truth, own, strict=True)]
                    effects += [max(abs(a - b) for a, b in zip(plain, own, strict=True))]
                report(shape, dtype, trainer, rank, sorted(gaps), min(effects))


def report(
    shape: str, dtype: str, trainer: tuple[str, str], rank: int, gaps: list[float], effect: float
) -> None:
    weights, adapters = trainer
    how = weights if weights == adapters else f"{weights}, adapter {adapters}"
    figures = (sum(gaps) / len(gaps), gaps[int(0.99 * len(gaps))], gaps[-1])
    shown = " | ".join(f"{figure:.2g}" for figure in figures)
    print(f"| {shape} | {dtype} | {how} | {rank} | {shown} | {effect:.2g} |", flush=True)


def build(path: Path, shape: dict[str, int]) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    with torch.no_grad():
        # Logits with a standard deviation of 3: an entropy of a few nats, as of a trained model.
        model.lm_head.weight.normal_(std=3 / shape["hidden_size"] ** 0.5)
        model.model.embed_tokens.weight.normal_()
        for parameter in model.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def adapter(base: Path, path: Path, rank: int, seed: int, dtype: str) -> Path:
    """A random adapter, stored in the serving dtype, as it travels."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(
        Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2 / rank**0.5)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(path)
    return path


def probe_tokens(vocabulary: int) -> list[int]:
    import random

    choose = random.Random(7)
    return [choose.randrange(vocabulary) for _ in range(TOKENS)]


def trainer_logprobs(
    base: Path, path: Path, tokens: list[int], weights: str, adapters: str
) -> list[float]:
    import torch
    from peft import PeftModel
    from transformers import Qwen2ForCausalLM

    model: Any = Qwen2ForCausalLM.from_pretrained(base, dtype=getattr(torch, weights))
    model = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, adapters))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


def engine_logprobs(
    base: Path, adapters: dict[tuple[int, int], Path], tokens: list[int], dtype: str
) -> dict[Any, list[float]]:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from vllm_bucket_lora.prober import probe_params

    llm = LLM(
        str(base), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, enable_lora=True,
        max_lora_rank=max(RANKS), max_loras=1, max_model_len=256, max_num_batched_tokens=4096,
    )  # fmt: skip
    found = {}
    for number, (key, path) in enumerate([(None, None), *adapters.items()]):
        request = LoRARequest(f"a{number}", number, str(path)) if path else None
        (output,) = llm.generate(
            {"prompt_token_ids": tokens}, probe_params(), lora_request=request, use_tqdm=False
        )
        pairs = zip(output.prompt_logprobs, tokens, strict=True)
        found[key] = [given[token].logprob for given, token in pairs if given]
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main()
