"""Two adapters of one number, in a real engine: neither is ever served with the other's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import environment
from tests.integration.plugin.tiny_model import true_tokens

pytestmark = pytest.mark.slow

PROMPT = [110, 117, 109, 98, 101, 114, 115]
TOKENS = 8

ENGINE = """
import json, sys, time

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from vllm_bucket_lora.engine import stable_id
from vllm_bucket_lora.worker import PREPARE, PREPARED

model, paths, prompt, count = json.loads(sys.argv[1])
llm = LLM(model, enable_lora=True, max_lora_rank=8, max_loras=2, max_cpu_loras=4,
          dtype="float32", enforce_eager=True, max_model_len=128)
names = {"first": "run-v1", "twin": "run-v4097", "third": "run-v8193"}
number = stable_id(names["first"])
assert {stable_id(name) for name in names.values()} == {number}


def read_ahead(which):
    llm.collective_rpc(PREPARE, args=(names[which], number, paths[which]))
    while not all(llm.collective_rpc(PREPARED, args=(number,))):
        time.sleep(0.01)


def request(which):
    return LoRARequest(names[which], number, paths[which])


def load(which):
    assert llm.llm_engine.add_lora(request(which))


def remove():
    llm.llm_engine.remove_lora(number)


def say(what, which):
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    [output] = llm.generate(
        {"prompt_token_ids": prompt}, greedy, lora_request=request(which), use_tqdm=False
    )
    print(json.dumps([what, which, list(output.outputs[0].token_ids)]), flush=True)


read_ahead("third"), load("third")  # from now on slots are filled from the staging area
say("as usual", "third")
remove()

read_ahead("first"), remove(), load("twin")
say("the first one's load was given up", "twin")
remove()

read_ahead("first"), load("twin")
say("the first one's load never came", "twin")
remove()

read_ahead("first"), read_ahead("twin"), load("twin")
say("both were read ahead", "twin")

try:
    load("first")
except Exception as error:
    print(json.dumps(["refused", "first", str(error)]), flush=True)
say("after the refusal", "twin")
remove()
read_ahead("first"), load("first")
say("after the twin is gone", "first")
"""


def test_no_adapter_is_served_with_the_weights_of_another_one_of_its_number(
    base: Path, tmp_path: Path, new_run: RunMaker
) -> None:
    run, versions = new_run("numbers"), {"first": 1, "twin": 4097, "third": 8193}
    paths = {
        which: _write(tmp_path / "bucket-lora-x" / "adapters" / "run" / f"v{version:08}", run, n)
        for n, (which, version) in enumerate(versions.items(), 1)
    }
    told = _told(base, paths)
    true = {which: true_tokens(base, path, PROMPT, TOKENS) for which, path in paths.items()}
    assert len({tuple(tokens) for tokens in true.values()}) == 3
    answers = [(what, which, said) for what, which, said in told if what != "refused"]
    assert answers == [(what, which, true[which]) for what, which, _ in answers]
    assert len(answers) == 6
    refusals = [said for what, _, said in told if what == "refused"]
    assert len(refusals) == 1
    assert "the engine still has run-v4097 under the number of run-v1" in refusals[0]


def _write(folder: Path, run: Any, seed: int) -> Path:
    weights, config = run.make(seed)
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _told(base: Path, paths: dict[str, Path]) -> list[tuple[str, str, Any]]:
    task = [str(base), {which: str(path) for which, path in paths.items()}, PROMPT, TOKENS]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, json.dumps(task)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    return [tuple(json.loads(line)) for line in lines]
