"""The trainer's half of a probe: what its own model computes for a short fixed sequence.

Owns the forward pass. What a probe is, and how a replica is held against it, is in
``adapter_bucket.probe``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adapter_bucket.errors import ConfigError
from adapter_bucket.probe import MIN_TOKENS, Probe, make_probe
from trl_async_bucket.shard_layout import settle

PROBE_TOKENS = 32

TEXT = (
    "A probe is a short text whose tokens both sides score. If the numbers agree, the server "
    "computes with the weights it was given; if not, something between them was lost."
)

Score = Callable[[Any, torch.Tensor], torch.Tensor]
"""Of a model and tokens ``[1, length]``: log-probability of each token given those before it, at
temperature 1, ``[length - 1]``."""


def score_plainly(model: Any, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Score one sequence with a model that gives logits; see ``Score``."""
    logits = model(input_ids=tokens, **arguments).logits
    scores = logits[0, :-1].float().log_softmax(dim=-1)
    return scores.gather(1, tokens[0, 1:, None])[:, 0]


def probe_tokens(tokenizer: Any, vocabulary: int) -> list[int]:
    """Token ids of the probe, the same in every process of a run.

    Args:
        tokenizer: The trainer's tokenizer or processor, or ``None``.
        vocabulary: Number of token ids the model knows.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    ids = list(tokenizer(TEXT)["input_ids"])[:PROBE_TOKENS] if tokenizer is not None else []
    if len(ids) < MIN_TOKENS or max(ids) >= vocabulary:
        # A tokenizer that makes nothing of the text: any ids are a valid sequence.
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (PROBE_TOKENS,), generator=generator).tolist()
    return ids


class ProbeMaker:
    """Makes the probes of one run. All ranks call ``make``: a sharded forward is a collective.

    Args:
        token_ids: See ``probe_tokens``.
        dtype: What the replicas compute in, for the tolerance.
        score: For models whose forward is not the plain one.
    """

    def __init__(
        self, token_ids: Sequence[int], *, dtype: str, score: Score = score_plainly
    ) -> None:
        self._token_ids = list(token_ids)
        self._dtype = dtype
        self._score_with = score
        self._base_logprobs: list[float] | None = None

    def make(self, model: Any) -> Probe:
        """Score the sequence with the model as it is now: one forward pass, two the first time.

        Args:
            model: A ``peft.PeftModel``; its training mode and RNG state, and what of it is
                trainable, are left as they were.

        Raises:
            ConfigError: the model's forward cannot be called this way.
        """
        with _evaluating(model):
            if self._base_logprobs is None:
                with model.disable_adapter():
                    self._base_logprobs = self._score(model)
            own = self._score(model)
        return make_probe(
            self._token_ids, own, dtype=self._dtype, base_logprobs=self._base_logprobs
        )

    def _score(self, model: Any) -> list[float]:
        tokens = torch.tensor([self._token_ids], device=model.device)
        try:
            values: list[float] = self._score_with(model, tokens).tolist()
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"the probe's forward pass failed ({error}); set bucket_probe_every=0 to train "
                "without probes"
            ) from error
        return values


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    settle(model)
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for module, _ in modes:
        if hasattr(module, "quant_state"):
            # bitsandbytes' 4-bit layer, to which its mode says one thing only: at a forward in eval
            # mode a CPU with AVX512-BF16 has its weight laid out anew, for good, after which it
            # gives no gradient to what is below it, and is no shard any more.
            module.training = True
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:  # each by itself: a frozen part may have been in eval mode
            module.training = mode
        # PEFT freezes the factors of an adapter that it disables, and on enabling makes all of them
        # trainable: also those that were frozen, and, where FSDP2 has not cut a module again behind
        # the forward pass, those of its temporary whole tensors instead of the trained ones.
        settle(model)
        for parameter, was_trainable in trainable:
            if parameter.requires_grad != was_trainable:
                parameter.requires_grad_(was_trainable)
