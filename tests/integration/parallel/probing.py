"""A probe made on two ranks in the middle of training, beside one of the same weights on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from adapter_bucket.probe import Probe, difference
from tests.integration.parallel.setups import Setup, load_base
from trl_async_bucket.probe_maker import ProbeMaker, probe_tokens

AT_STEP = 1
"""Training goes on afterwards: a probe must leave a sharded model as it was."""


def maker() -> ProbeMaker:
    return ProbeMaker(probe_tokens(None, 320), dtype="float32")


class ProbeOnce(TrainerCallback):  # type: ignore[misc]
    """Makes a probe as a sync of the drop-in trainers does, on all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.probe: Probe | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AT_STEP:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            self.probe = maker().make(model)


def difference_to_one_process(probe: Probe, setup: Setup, out: Path) -> float:
    """Largest difference of a logprob, nats, of the adapter's and the base model's."""
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would cut this model, too
    whole = PeftModel.from_pretrained(load_base(setup, out / "base"), out / f"peft-{AT_STEP}")
    expected = maker().make(whole)
    assert probe.base_logprobs is not None
    assert expected.base_logprobs is not None
    return max(
        difference(probe.logprobs, expected.logprobs),
        difference(probe.base_logprobs, expected.base_logprobs),
    )
