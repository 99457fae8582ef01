"""Log-probabilities of completions by transformers and PEFT, from the bytes of a version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.train import LORA_RANK
from tests.faults.matrix.recorder import Generation

BATCH = 128


class Truth:
    """A policy on the CPU in float32 that takes the weights of any version.

    Args:
        model: Directory of the base model.
    """

    def __init__(self, model: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
        self._policy: Any = get_peft_model(base, config).eval()

    def differences(self, weights: Path, generations: Sequence[Generation]) -> list[float]:
        """Largest difference of any token's log-probability, for each completion, in nats."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        state = load_file(str(weights))
        loaded = set_peft_model_state_dict(self._policy, state)
        missing = [key for key in loaded.missing_keys if "lora_" in key]
        if loaded.unexpected_keys or missing:
            raise RuntimeError(f"{weights.name} does not fit the model: {loaded}")
        found: list[float] = []
        for start in range(0, len(generations), BATCH):
            found += self._batch(generations[start : start + BATCH])
        return found

    def _batch(self, generations: Sequence[Generation]) -> list[float]:
        import torch

        rows = [[*one.prompt, *one.tokens] for one in generations]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        # Padding on the right of a causal model changes nothing before it.
        with torch.no_grad():
            scores = self._policy(input_ids=ids).logits.log_softmax(-1)
        found = []
        for row, one in enumerate(generations):
            first = len(one.prompt)
            places = torch.arange(first - 1, first - 1 + len(one.tokens))
            true = scores[row, places, torch.tensor(one.tokens)]
            given = torch.tensor(one.logprobs)
            found.append(float((true - given).abs().max()))
        return found
