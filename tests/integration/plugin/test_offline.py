"""``follow`` with a real offline ``LLM``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import environment
from tests.integration.plugin.tiny_model import true_tokens

pytestmark = pytest.mark.slow

PROMPT = [110, 111, 116, 101, 98, 111, 111, 107]

NOTEBOOK = """
import itertools, json, sys
from vllm import LLM, SamplingParams
from vllm_bucket_lora import follow
from vllm_bucket_lora.ports import LoadRefused

if __name__ == "__main__":
    base, url = sys.argv[1:]
    llm = LLM(base, max_model_len=128, dtype="float32", enforce_eager=True, enable_lora=True,
              max_lora_rank=8, max_loras=1, max_num_batched_tokens=4096)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with follow(llm, url, "notebook") as run:
        for _ in itertools.chain(["first"], sys.stdin):
            try:
                request = run.newest(wait_s=30)
                out = llm.generate({"prompt_token_ids": %r}, greedy, lora_request=request)
                answer = [run.version, list(out[0].outputs[0].token_ids)]
            except LoadRefused as error:
                answer = [run.version, f"{type(error).__name__}: {error}"]
            print("ANSWER", json.dumps(answer), flush=True)
"""


def test_a_notebook_generates_with_the_newest_version_that_is_right(
    base: Path, bucket: Path, new_run: RunMaker, tmp_path: Path
) -> None:
    run = new_run("notebook")
    weights, _ = run.make(3)
    renamed = {name.replace(".layers.1.", ".blocks.1."): t for name, t in load(weights).items()}
    answers = _answers(
        base,
        bucket,
        tmp_path / "notebook.py",
        [
            lambda: run.publish(1, probe=run.true_probe(1, PROMPT)),
            lambda: run.publish(2),
            lambda: run.publish(3, weights=save(renamed)),
            lambda: run.publish(4, probe=run.true_probe(1, PROMPT)),
        ],
    )
    assert [version for version, _ in answers] == [1, 2, 2, 2]
    for version, tokens in answers[:2]:
        assert tokens == true_tokens(base, run.path(version), PROMPT, len(tokens))
    assert "no module model.blocks.1.mlp.down_proj" in answers[2][1]
    assert answers[3][1].startswith("ProbeFailed: its probe failed: with the adapter")


def _answers(base: Path, bucket: Path, script: Path, steps: list[Callable[[], str]]) -> list[Any]:
    """What the notebook says after each step."""
    script.write_text(NOTEBOOK % PROMPT)
    answers: list[Any] = []
    steps[0]()
    with subprocess.Popen(
        [sys.executable, str(script), str(base), f"file://{bucket}"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as notebook:
        assert notebook.stdin is not None
        assert notebook.stdout is not None
        for line in notebook.stdout:
            if line.startswith("ANSWER "):
                answers.append(json.loads(line.removeprefix("ANSWER ")))
                if len(answers) == len(steps):
                    break
                steps[len(answers)]()
                notebook.stdin.write("next\n")
                notebook.stdin.flush()
        notebook.stdin.close()
        notebook.stdout.read()
    assert notebook.returncode == 0
    return answers
