"""``follow`` with a real offline ``LLM``: the notebook of the examples, in a process of its own."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from safetensors.torch import load, save
from transformers import AutoTokenizer

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import environment
from tests.integration.plugin.tiny_model import true_tokens

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "examples" / "notebook_follow.ipynb"
PROMPT = "notebook"
PROBED = [110, 111, 116, 101, 98, 111, 111, 107]
BROKEN = "\N{REPLACEMENT CHARACTER}"
TOKENS = 8
"""As many as the notebook asks for with ``TINY=1``."""

SAID = re.compile(r"notebook-v(\d+)(?: stays, (.*))?: ('.*'|\".*\")")


def test_a_notebook_generates_with_the_newest_version_that_is_right(
    base: Path, bucket: Path, new_run: RunMaker
) -> None:
    run = new_run("notebook")
    weights, _ = run.make(3)
    renamed = {name.replace(".layers.1.", ".blocks.1."): t for name, t in load(weights).items()}
    answers = _answers(
        base,
        bucket,
        [
            lambda: run.publish(1, probe=run.true_probe(1, PROBED)),
            lambda: run.publish(2),
            lambda: run.publish(3, weights=save(renamed)),
            lambda: run.publish(4, probe=run.true_probe(1, PROBED)),
        ],
    )
    assert [version for version, _, _ in answers] == [1, 2, 2, 2]
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer(PROMPT)["input_ids"]
    for version, why, text in answers[:2]:
        true = true_tokens(base, run.path(version), prompt, TOKENS)
        expected = tokenizer.decode(true, skip_special_tokens=True)
        # vLLM keeps the bytes of a character that has not ended to itself.
        assert (why, text.rstrip(BROKEN)) == (None, expected.rstrip(BROKEN))
    assert "LoadRefused: " in str(answers[2][1])
    assert "no module model.blocks.1.mlp.down_proj" in str(answers[2][1])
    assert str(answers[3][1]).startswith("ProbeFailed: its probe failed: with the adapter")
    assert answers[1][2] == answers[2][2] == answers[3][2] != answers[0][2]


def _answers(
    base: Path, bucket: Path, steps: list[Callable[[], str]]
) -> list[tuple[int, str | None, str]]:
    """What the notebook says after each step: version, why it stays, and the answer."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    names = {"MODEL": str(base), "BUCKET_URL": bucket.as_uri(), "RUN_ID": "notebook"}
    answers: list[tuple[int, str | None, str]] = []
    steps[0]()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(TINY="1", PROMPT=PROMPT, **names),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if said := SAID.fullmatch(line.strip()):
                version, why, text = said.groups()
                answers.append((int(version), why, ast.literal_eval(text)))
                if len(answers) == len(steps):
                    break
                steps[len(answers)]()
        process.send_signal(signal.SIGINT)  # "interrupt the cell"
        last_words = process.stdout.read()
    assert process.returncode == 0
    assert "interrupted" in last_words
    return answers
