"""The probe: proof that an engine computes with an adapter as its trainer does. Pure.

Digests prove that a replica holds the right bytes. They do not prove that its engine uses them: an
adapter can be applied in part, with another scaling, to another revision of the base model, or not
at all, and nothing fails. So the writer of a version may put a short token sequence into its entry,
with the log-probabilities that the trainer's own model gives. A replica computes the same before
the version is ready. This module owns the schema and the comparison; running an engine is not its
business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from adapter_bucket.errors import ConfigError
from adapter_bucket.wire import READABLE

MIN_TOKENS, MAX_TOKENS = 2, 256
"""16 to 64 are enough: each token is about 30 bytes of a manifest that has a limit of 1 MiB."""

MAX_TOKEN_ID = 2**31 - 1

ROUND_DIGITS = 5
"""Decimals that ``make_probe`` keeps, far finer than any tolerance."""

TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
"""By serving dtype: largest difference between trainer and engine that passes as rounding, nats.
Measured for each; figures and reasons in ``docs/decisions/0040-the-probe.md``."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, Field(ge=-1e4, le=1e-3)]
"""Nats. A little above zero, because a sum of rounded exponentials is not exactly one."""


class Probe(BaseModel):
    """A token sequence, and how probable the trainer's model finds each token of it."""

    model_config = READABLE

    token_ids: list[TokenId] = Field(min_length=MIN_TOKENS, max_length=MAX_TOKENS)
    """The sequence, as token ids of the base model: no chat template, no tokenizer is involved."""
    logprobs: list[Logprob]
    """Log-probability of token i + 1 given tokens 0 to i, at temperature 1, with the adapter; one
    less than there are tokens."""
    tolerance: float = Field(gt=0, le=10)
    """Largest difference of any log-probability that a replica may show, nats."""
    base_logprobs: list[Logprob] | None = None
    """The same without the adapter. Lets a replica notice that its base model is another one."""
    effect: float = Field(default=0.0, ge=0, le=1e4)
    """Least largest difference, nats, that the adapter must make against the base model on the
    replica itself. 0: none is asked for, since the adapter is still (nearly) zero."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        expected = len(self.token_ids) - 1
        for name in ("logprobs", "base_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != expected:
                raise ValueError(f"{name} has {len(values)} values; the tokens need {expected}")
        if self.base_logprobs is not None:
            shown = difference(self.logprobs, self.base_logprobs)
            if shown < self.effect:
                raise ValueError(
                    f"effect is {self.effect:g}, but the trainer's own values differ from the "
                    f"base model's by {shown:g} only"
                )
        return self


def default_tolerance(dtype: str) -> float:
    """Tolerance for a serving dtype, nats.

    Raises:
        ConfigError: no tolerance was measured for the dtype.
    """
    try:
        return TOLERANCES[dtype]
    except KeyError:
        raise ConfigError(
            f"no tolerance was measured for dtype {dtype!r}, only for {', '.join(TOLERANCES)}; "
            "set the probe's tolerance"
        ) from None


def make_probe(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    dtype: str,
    base_logprobs: Sequence[float] | None = None,
    tolerance: float | None = None,
) -> Probe:
    """Make the probe of a version.

    An effect is asked for only if it is clear: half of what the trainer sees, once that is above
    twice the tolerance. Below, rounding could hide it, and a right adapter would be refused.

    Args:
        token_ids: A fixed sequence; the same one for every version of a run is fine.
        logprobs: See ``Probe.logprobs``.
        dtype: What replicas compute in, without ``torch.``: ``bfloat16``.
        base_logprobs: See ``Probe.base_logprobs``. ``None`` asks for no effect.
        tolerance: Instead of ``default_tolerance(dtype)``.

    Raises:
        ConfigError: no default for the dtype, or the values do not fit together or are not finite.
    """
    limit = default_tolerance(dtype) if tolerance is None else tolerance
    own = _rounded(logprobs)
    base = None if base_logprobs is None else _rounded(base_logprobs)
    try:
        clear = 0.0 if base is None else difference(own, base)
        return Probe(
            token_ids=list(token_ids),
            logprobs=own,
            tolerance=limit,
            base_logprobs=base,
            effect=round(clear / 2, ROUND_DIGITS) if clear > 2 * limit else 0.0,
        )
    except ValueError as error:  # pydantic's is one too
        raise ConfigError(f"a probe of {len(token_ids)} tokens: {str(error)[:300]}") from None


def probe_faults(
    probe: Probe, measured_logprobs: Sequence[float], measured_base: Sequence[float] | None = None
) -> list[str]:
    """Say why an engine does not compute as the trainer does; empty if it does.

    Args:
        probe: What the version's entry holds.
        measured_logprobs: The engine's log-probabilities with the adapter, in the probe's order.
        measured_base: The same without it. Without them, what concerns the base is not checked.
    """
    expected = len(probe.logprobs)
    for values in (measured_logprobs, measured_base):
        if values is not None and len(values) != expected:
            return [f"the engine gave {len(values)} log-probabilities where {expected} are needed"]
    faults = []
    own = _widest(probe.logprobs, measured_logprobs)
    if own.difference > probe.tolerance:
        faults.append(f"with the adapter, {own.told(probe.tolerance)}")
    if measured_base is None:
        return faults
    if probe.base_logprobs is not None:
        base = _widest(probe.base_logprobs, measured_base)
        if base.difference > probe.tolerance:
            faults.append(
                f"without the adapter, {base.told(probe.tolerance)}: this is not the base model "
                "that the run is trained on, or another revision of it"
            )
    shown = difference(measured_logprobs, measured_base)
    if shown < probe.effect:
        faults.append(
            f"the adapter changes no log-probability by more than {shown:.4g} nats, and "
            f"{probe.effect:.4g} are expected: the engine does not apply it, or not all of it"
        )
    return faults


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest absolute difference of two sequences of equal length."""
    return _widest(one, other).difference


@dataclass(frozen=True)
class _Gap:
    """Where two sequences differ most."""

    difference: float
    position: int
    expected: float
    measured: float

    def told(self, tolerance: float) -> str:
        return (
            f"the log-probability of token {self.position + 1} is {self.measured:.4f} here and "
            f"{self.expected:.4f} at the trainer; they may differ by {tolerance:g} nats"
        )


def _widest(expected: Sequence[float], measured: Sequence[float]) -> _Gap:
    gaps = [
        # A NaN compares as no larger than anything: it must count as the widest gap there is.
        _Gap(abs(m - e) if math.isfinite(m) else math.inf, position, e, m)
        for position, (e, m) in enumerate(zip(expected, measured, strict=True))
    ]
    return max(gaps, key=lambda gap: gap.difference)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(value), ROUND_DIGITS) for value in values]
