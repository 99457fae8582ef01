"""``follow`` with a real offline ``LLM``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import environment
from tests.integration.plugin.tiny_model import true_tokens

pytestmark = pytest.mark.slow

PROMPT = [110, 111, 116, 101, 98, 111, 111, 107]

NOTEBOOK = """
import itertools, json, sys
from vllm import LLM, SamplingParams
from vllm_bucket_lora import follow

if __name__ == "__main__":
    base, url = sys.argv[1:]
    llm = LLM(base, max_model_len=128, dtype="float32", enforce_eager=True, enable_lora=True,
              max_lora_rank=8, max_loras=1, max_num_batched_tokens=4096)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with follow(llm, url, "notebook") as run:
        for _ in itertools.chain(["first"], sys.stdin):
            out = llm.generate({"prompt_token_ids": %r}, greedy, lora_request=run.newest(wait_s=30))
            answer = [run.version, list(out[0].outputs[0].token_ids)]
            print("ANSWER", json.dumps(answer), flush=True)
"""


def test_a_notebook_generates_with_the_newest_version(
    base: Path, bucket: Path, new_run: RunMaker, tmp_path: Path
) -> None:
    run = new_run("notebook")
    run.publish(1)
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK % PROMPT)
    with subprocess.Popen(
        [sys.executable, str(script), str(base), f"file://{bucket}"],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as notebook:
        assert notebook.stdin is not None
        assert notebook.stdout is not None
        answers = []
        for line in notebook.stdout:
            if line.startswith("ANSWER "):
                answers.append(json.loads(line.removeprefix("ANSWER ")))
                if len(answers) == 2:
                    break
                run.publish(2)
                notebook.stdin.write("next\n")
                notebook.stdin.flush()
        notebook.stdin.close()
        notebook.stdout.read()
    assert notebook.returncode == 0
    assert [version for version, _ in answers] == [1, 2]
    for version, tokens in answers:
        assert tokens == true_tokens(base, run.path(version), PROMPT, len(tokens))
