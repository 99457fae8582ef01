"""Refusals before the first step: what these replicas could not serve, said at once.

Owns the comparison of what is to be trained with what the replicas say of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapter_bucket.base_model import BaseModelRef, mismatch
from adapter_bucket.errors import ConfigError
from adapter_bucket.servable import rank_remedy, servable_faults
from adapter_bucket.status import ReplicaStatus, slots_needed

BITSANDBYTES = "bitsandbytes"
"""The same word in transformers' configs and in vLLM's."""


def check_adapter_config(adapter_config: Mapping[str, Any]) -> None:
    """Refuse a PEFT config that vLLM cannot serve as a plain LoRA adapter.

    Raises:
        ConfigError: names every field at fault and what to change.
    """
    if faults := servable_faults(adapter_config):
        raise ConfigError(
            "this PEFT config cannot be served by vLLM as a LoRA adapter: " + "; ".join(faults)
        )


def check_trained(model: Any, adapter: str) -> None:
    """Refuse a model whose policy is more than base model and one adapter.

    Args:
        model: A ``peft.PeftModel``.
        adapter: PEFT's name of the adapter that is published.

    Raises:
        ConfigError: another adapter is active, too, weights besides the factors are trained, or a
            factor belongs to several modules.
    """
    active = list(model.active_adapters)
    if active != [adapter]:
        raise ConfigError(
            f"the model computes with the adapters {active}, and only {adapter!r} would be "
            f"published: replicas would serve another policy. Call model.set_adapter({adapter!r})"
        )
    others = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    ]
    if others:
        raise ConfigError(
            f"{len(others)} weights besides the LoRA factors are trainable, the first is "
            f"{others[0]}: they would not be published, and replicas would serve another policy "
            "than is trained. Freeze them (requires_grad_(False)), or target their modules by LoRA"
        )
    once = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name and name not in once:
            raise ConfigError(
                f"LoRA factor {name} is also that of another module, as the model's modules share "
                "their weights: a version names it once, and replicas would leave it out of the "
                "others. Leave the shared modules out of target_modules"
            )


def check_replicas(
    replicas: Mapping[str, ReplicaStatus],
    *,
    base_model: BaseModelRef,
    rank: int,
    window: int,
) -> None:
    """Refuse replicas that could never serve the run.

    Args:
        replicas: Status by URL.
        base_model: What is trained.
        rank: Largest rank of any module.
        window: Versions a replica must keep ready, ``max_staleness + 2``.

    Raises:
        ConfigError: names the replica, the flag and the value it needs.
    """
    for url, replica in replicas.items():
        served = BaseModelRef(
            id=replica.base_model, revision=replica.revision, architecture=replica.architecture
        )
        if difference := mismatch(base_model, served):
            raise ConfigError(
                f"replica {url}: {difference.replace('this server', 'it')}. Serve the trained "
                "model, or set bucket_base_model if it only has another name there"
            )
        if replica.max_lora_rank < rank:
            raise ConfigError(
                f"replica {url} was started with --max-lora-rank {replica.max_lora_rank}, but the "
                f"adapter has rank {rank}: {rank_remedy(rank)}"
            )
        needed = slots_needed(window)
        if replica.max_loras < needed:
            fits = replica.max_loras - (needed - window) - 2
            lower = f", or lower max_staleness to {fits}" if fits >= 0 else ""
            raise ConfigError(
                f"replica {url} was started with --max-loras {replica.max_loras}, but this run "
                f"needs {needed} adapter slots: {window} version(s) ready (max_staleness + 2; 1 "
                f"on-policy) and the next one. Start it with --max-loras {needed}{lower}"
            )


def check_quantization(replicas: Mapping[str, ReplicaStatus], trained: str | None) -> None:
    """Refuse replicas that serve the base model of an adapter trained on a quantised one otherwise.

    Only of bitsandbytes it is known that no other method computes the same: the others have one
    name in transformers and several in vLLM. A replica that does not say is believed.

    Args:
        replicas: Status by URL.
        trained: Quantization method of the trained base model; ``None`` without one.

    Raises:
        ConfigError: names the replica and both ways out.
    """
    for url, replica in replicas.items():
        served = replica.quantization
        if trained is None or not served:
            continue
        if served == "none" or (trained == BITSANDBYTES and served != BITSANDBYTES):
            how = "as it is" if served == "none" else f"as {served}"
            raise ConfigError(
                f"the base model is trained quantised ({trained}), and replica {url} serves it "
                f"{how}: the sampled policy would be another one than the "
                "trained. Start the replica with the same --quantization (bitsandbytes needs "
                "vllm-bnb-plugin from vLLM 0.28 on), or train without quantization_config"
            )


def rounding_notes(
    replicas: Mapping[str, ReplicaStatus], *, trained: str, published: str
) -> list[str]:
    """What differs in rounding only: no reason to stop, but to know of when ``ratio`` is off.

    Args:
        replicas: Status by URL.
        trained: dtype of the trained base model, without ``torch.``.
        published: dtype of the published adapters.
    """
    notes = []
    for url, replica in replicas.items():
        if replica.dtype != trained:
            notes.append(
                f"replica {url} serves in {replica.dtype}, the model is trained in {trained}: "
                "logprobs of the two differ by rounding, and ratio scatters with them. "
                f"--dtype {trained} there closes the gap"
            )
        if replica.dtype != published:
            notes.append(
                f"adapters are published as {published} (bucket_dtype) and replica {url} casts "
                f"them to {replica.dtype} when it loads them"
            )
    return notes


def serving_dtype(replicas: Mapping[str, ReplicaStatus]) -> str:
    """The dtype all replicas serve in.

    Raises:
        ConfigError: they differ; one set of bytes cannot be exact for all of them.
    """
    dtypes = {url: replica.dtype for url, replica in replicas.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{url}: {dtype}" for url, dtype in dtypes.items())
        raise ConfigError(f"the replicas serve in different dtypes ({listed}); set bucket_dtype")
    return next(iter(dtypes.values()))
