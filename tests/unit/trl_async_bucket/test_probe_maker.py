from __future__ import annotations

from functools import partial

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.probe import difference, probe_faults
from tests.unit.trl_async_bucket.models import tiny_peft_model, train_one_step
from trl_async_bucket.probe_maker import (
    PROBE_TOKENS,
    ProbeMaker,
    probe_tokens,
    score_plainly,
)


def test_a_probe_holds_what_the_model_computes_now() -> None:
    import torch

    model = tiny_peft_model()
    maker = ProbeMaker([3, 1, 4, 1, 5], dtype="float32")
    probe = maker.make(model)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits
    expected = torch.log_softmax(logits[0], dim=-1)[[0, 1, 2, 3], [1, 4, 1, 5]]
    assert probe.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    train_one_step(model)
    later = maker.make(model)
    assert later.base_logprobs == probe.base_logprobs
    assert difference(later.logprobs, probe.logprobs) > 1e-3


def test_a_replica_that_serves_the_base_model_fails_the_probe() -> None:
    model = tiny_peft_model(lora_alpha=400)
    probe = ProbeMaker([3, 1, 4, 1, 5, 9, 2, 6], dtype="float32").make(model)
    assert probe.base_logprobs is not None
    assert probe_faults(probe, probe.logprobs, probe.base_logprobs) == []
    assert probe_faults(probe, probe.base_logprobs, probe.base_logprobs)


def test_making_a_probe_changes_nothing_of_the_model() -> None:
    import torch

    model = tiny_peft_model(lora_dropout=0.5)
    model.train()
    model.base_model.model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    ProbeMaker([1, 2, 3], dtype="float32").make(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_a_layer_of_bitsandbytes_is_never_called_in_eval_mode(mode: bool) -> None:
    """On a CPU it would lay its weight out anew; the real one is in tests/integration/parallel."""
    import torch

    modes: list[tuple[bool, bool]] = []

    class Quantised(torch.nn.Module):  # type: ignore[misc]
        quant_state = None

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, model.training))
            return states

    model = tiny_peft_model()
    model.base_model.model.model.norm = torch.nn.Sequential(Quantised())
    model.train(mode)
    ProbeMaker([1, 2, 3], dtype="float32").make(model)
    assert modes == [(True, False)] * 2
    assert {module.training for module in model.modules()} == {mode}


def test_a_model_that_cannot_be_called_says_how_to_do_without() -> None:
    maker = ProbeMaker([1, 2], dtype="float32", score=partial(score_plainly, input_ids=1))
    with pytest.raises(ConfigError, match="bucket_probe_every=0"):
        maker.make(tiny_peft_model())


def test_the_tokens_are_the_same_in_every_process() -> None:
    class Unhelpful:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [10**6] * len(text)}

    for tokenizer in (None, Unhelpful()):
        tokens = probe_tokens(tokenizer, 64)
        assert tokens == probe_tokens(tokenizer, 64)
        assert len(tokens) == PROBE_TOKENS
        assert max(tokens) < 64
