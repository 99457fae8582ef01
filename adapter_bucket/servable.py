"""Which adapters vLLM serves as they are. Pure.

Of an adapter config vLLM reads ``r``, ``lora_alpha``, ``use_rslora``, ``bias``, ``modules_to_save``
and ``use_dora``, and of the tensors ``lora_A`` and ``lora_B``. Every other PEFT feature it refuses
late, or ignores without a word and serves other weights than the trainer has. So trainer and
replica both ask here, the trainer before its first step.

*Source*: vLLM 0.31 ``lora/peft_helper.py``, ``lora/lora_model.py``; PEFT 0.21 ``tuners/lora``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_MUST_BE_EMPTY = {
    "modules_to_save": "train LoRA factors only; full modules do not travel over the bucket",
    "use_dora": "set use_dora=False; vLLM has no magnitude vectors",
    "lora_bias": "set lora_bias=False; vLLM applies no adapter bias",
    "trainable_token_indices": "remove it; trained token embeddings are not part of a LoRA adapter",
    "target_parameters": "target modules instead (target_modules); fused parameters, as in MoE "
    "experts, are not loaded from a PEFT adapter",
    "layer_replication": "remove it; the served model has the layers of its base model only",
    "alora_invocation_tokens": "remove it; vLLM applies an adapter to every token",
    "use_qalora": "set use_qalora=False; vLLM does not pool the input of lora_A",
    "monteclora_config": "remove it; vLLM samples no adapter weights",
    "use_bdlora": "remove it; block-diagonal factors are not plain lora_A and lora_B",
    "arrow_config": "remove it; vLLM does not route between adapters",
    "kasa_config": "remove it; it changes the base weights and puts a diagonal between A and B",
    "megatron_config": "remove it; train on the Hugging Face module layout",
}
"""Fields that must be absent, null, false or empty, with the change to make."""

_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initialisations that subtract from the base weights; a replica serves the original ones."""

_NOT_LINEAR = frozenset(
    {
        "embed_in", "embed_out", "embed_positions", "embed_tokens", "embeddings", "lm_head",
        "output_layer", "shared", "tok_embeddings", "wpe", "wte", "word_embeddings",
    }
)  # fmt: skip
"""Last name of embedding and head modules in the model families of the Hub."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's ``--max-lora-rank`` takes. *Source*: vLLM 0.31 ``config/lora.py``."""


def rank_remedy(rank: int) -> str:
    """What to do about a server whose ``--max-lora-rank`` is below ``rank``."""
    needed = next((value for value in LORA_RANKS if value >= rank), None)
    if needed is None:
        return f"vLLM serves at most rank {LORA_RANKS[-1]}"
    return f"start the server with --max-lora-rank {needed}"


def servable_faults(adapter_config: Mapping[str, Any]) -> list[str]:
    """Say why vLLM would not serve exactly what this adapter means.

    Args:
        adapter_config: Content of ``adapter_config.json`` as it will be published, so with
            ``target_modules`` as the explicit list of names. Sets and tuples count as lists, so
            ``LoraConfig.to_dict()`` can be passed too.

    Returns:
        One text per fault, naming the field, its value and the change to make; empty if the
        adapter can be served. Never raises, whatever types the config holds.
    """
    config = adapter_config
    faults = [*_kind_faults(config), *_rank_faults(config), *_target_faults(config)]
    for field, remedy in _MUST_BE_EMPTY.items():
        if config.get(field):
            faults.append(_fault(field, config[field], remedy))
    if config.get("bias", "none") not in ("none", None):
        faults.append(_fault("bias", config["bias"], "set bias='none'; biases do not travel"))
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        faults.append(
            _fault(
                "init_lora_weights",
                init,
                "use True or 'gaussian'; this one changes the trainer's base weights, and a "
                "replica serves the original ones",
            )
        )
    return faults


def largest_rank(adapter_config: Mapping[str, Any]) -> int:
    """Largest rank of any module: what a replica's ``--max-lora-rank`` must reach.

    Raises:
        ValueError: ``r`` or a value of ``rank_pattern`` is not a positive integer.
    """
    ranks = [adapter_config.get("r"), *_pattern(adapter_config, "rank_pattern").values()]
    good: list[int] = [rank for rank in ranks if _positive_int(rank)]
    if len(good) != len(ranks):
        raise ValueError("r and every value of rank_pattern must be positive integers")
    return max(good)


def _kind_faults(config: Mapping[str, Any]) -> list[str]:
    kind = config.get("peft_type")
    name = getattr(kind, "value", kind)  # LoraConfig.to_dict() holds the enum, JSON its value
    if name == "LORA":
        return []
    return [_fault("peft_type", name, "use a LoraConfig; vLLM serves no other kind of adapter")]


def _rank_faults(config: Mapping[str, Any]) -> list[str]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _positive_int(rank):
        return [_fault("r", rank, "set it to a positive integer")]
    if not _positive_number(alpha):
        return [_fault("lora_alpha", alpha, "set it to a positive number")]
    ranks, alphas = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    rslora = bool(config.get("use_rslora"))
    wanted = _scaling(alpha, rank, rslora=rslora)
    faults = []
    if ranks and alphas and list(ranks) != list(alphas):
        # PEFT takes the first pattern that matches, in each of the two for itself.
        remedy = "write the same patterns, in the same order, into rank_pattern and alpha_pattern"
        faults.append(_fault("alpha_pattern", alphas, remedy))
    for pattern in {**ranks, **alphas}:
        of_rank, of_alpha = ranks.get(pattern, rank), alphas.get(pattern, alpha)
        field = "rank_pattern" if pattern in ranks else "alpha_pattern"
        if not _positive_int(of_rank) or not _positive_number(of_alpha):
            faults.append(_fault(field, {pattern: (of_rank, of_alpha)}, "use positive numbers"))
        elif not math.isclose(_scaling(of_alpha, of_rank, rslora=rslora), wanted, rel_tol=1e-9):
            remedy = (
                f"vLLM scales every module by {wanted:g}, from lora_alpha and r, and would serve "
                "other weights: choose rank_pattern and alpha_pattern so that alpha/rank is the "
                "same everywhere, or remove both"
            )
            faults.append(_fault(field, {pattern: (of_rank, of_alpha)}, remedy))
    return faults


def _target_faults(config: Mapping[str, Any]) -> list[str]:
    targets = config.get("target_modules")
    if (
        not isinstance(targets, Sequence | set | frozenset)
        or isinstance(targets, str)
        or not targets
    ):
        return [
            _fault(
                "target_modules",
                targets,
                "write the explicit list of module names; a pattern means other modules on "
                "another model",
            )
        ]
    names = sorted(str(target) for target in targets)
    bad = [name for name in names if name.rsplit(".", 1)[-1] in _NOT_LINEAR]
    if not bad:
        return []
    return [_fault("target_modules", bad, "target linear layers only, no embeddings and no head")]


def _scaling(alpha: float, rank: int, *, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def _pattern(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = config.get(field)
    return value if isinstance(value, Mapping) else {}


def _positive_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**31


def _positive_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 2.0**31


def _fault(field: str, value: object, remedy: str) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 120 else f"{shown[:120]}…"
    return f"{field} is {shown}: {remedy}"
