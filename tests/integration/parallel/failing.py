"""A run of two ranks under which the bucket breaks, and how it ends on each."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlsplit

import torch
from transformers import TrainerCallback

from adapter_bucket.errors import BucketError
from tests.faults.store_proxy import FaultProxy, Faults
from tests.integration.preemption.trainer import BucketTrainer, Config, Rows
from tests.unit.trl_async_bucket.models import tiny_peft_model

RUN = "run"
BREAKS_AFTER = 3
"""Step after which nothing can be published any more."""

S3_URL, S3_ENDPOINT = "FAILING_S3_URL", "FAILING_S3_ENDPOINT"
"""Environment: a bucket, and the part of its URL that is its server's address."""


class Breaking(TrainerCallback):  # type: ignore[misc]
    """Breaks the bucket between two syncs, once it holds some versions."""

    def __init__(self, break_it: Any) -> None:
        self._break = break_it

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == BREAKS_AFTER:
            self._break()


def train(name: str, out: Path) -> dict[str, Any]:
    """Train until it fails, for minutes if it did not."""
    with ExitStack() as stack:
        url, break_it = {"no-adapters": no_adapters, "only-503": only_503}[name](out, stack)
        config = Config(
            output_dir=str(out / "trainer"), bucket_url=url, bucket_run_id=RUN,
            bucket_probe_every=0, bucket_checkpoints=False, save_strategy="no", max_steps=100_000,
            per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        BucketTrainer.publish_timeout_s = 2.0
        trainer = BucketTrainer(tiny_peft_model(), config, train_dataset=Rows(0.0))
        if torch.distributed.get_rank() == 0:
            trainer.add_callback(Breaking(break_it))
        error = "none"
        try:
            trainer.train()
        except BucketError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "step": trainer.state.global_step}


def no_adapters(out: Path, stack: ExitStack) -> tuple[str, Any]:
    """Adapters cannot be written any more, the manifest can."""
    bucket = out / "bucket"

    def break_it() -> None:
        folder = bucket / "runs" / RUN / "adapters"
        folder.rename(folder.with_name("adapters-before"))
        folder.write_text("no directory")

    return bucket.as_uri(), break_it


def only_503(out: Path, stack: ExitStack) -> tuple[str, Any]:
    """A real S3 server of which nothing but "503 SlowDown" comes back any more."""
    url, endpoint = os.environ[S3_URL], os.environ[S3_ENDPOINT]
    parts = urlsplit(endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = FaultProxy((parts.hostname, parts.port))
    stack.callback(proxy.close)

    def break_it() -> None:
        stack.enter_context(proxy.failing(Faults(answer="SlowDown")))

    return url.replace(quote_plus(endpoint), quote_plus(proxy.endpoint)), break_it
