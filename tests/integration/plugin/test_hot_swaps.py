"""A hundred versions under load: nothing fails, and every answer is of the version it names."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.runs import MadeAdapter
from tests.integration.plugin.server import Server, wait_until
from tests.integration.plugin.tiny_model import true_tokens

pytestmark = pytest.mark.slow

SWAPS = 100
IN_FLIGHT = 16
WINDOW = 3
PROMPT = [104, 111, 116, 32, 115, 119, 97, 112]
LONGEST_PAUSE_S = 15.0
"""An answer takes about 0.2 s here, on a quiet machine; a busy one needs room."""


def test_a_hundred_swaps_under_load(
    server: Server, new_run: RunMaker, base: Path, tmp_path: Path
) -> None:
    run = new_run("swaps", window=WINDOW)
    adapters = [run.make(version) for version in range(1, SWAPS + 1)]
    newest = 0
    done = threading.Event()
    answers: dict[int, set[tuple[int, ...]]] = {}
    unadapted: set[tuple[int, ...]] = set()
    served: Counter[int] = Counter()
    slowest_s = 0.0

    def client(seed: int) -> None:
        nonlocal slowest_s
        choose = random.Random(seed)
        while not done.is_set():
            # Never the oldest of the window: the writer may move on while the request travels.
            version = max(1, newest - choose.randrange(WINDOW - 1))
            started = time.monotonic()
            tokens = server.generate(run.name(version), PROMPT)["token_ids"]
            slowest_s = max(slowest_s, time.monotonic() - started)
            answers.setdefault(version, set()).add(tuple(tokens))
            served[version] += 1
            if choose.random() < 0.1:
                unadapted.add(tuple(server.generate(server.model, PROMPT)["token_ids"]))

    run.publish_made(1, adapters[0])
    server.status(run.name(1), wait_s=20)
    newest = 1
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        clients = [pool.submit(client, seed) for seed in range(IN_FLIGHT)]
        try:
            for version in range(2, SWAPS + 1):
                run.publish_made(version, adapters[version - 1])
                about = server.status(run.name(version), wait_s=20).adapter
                assert about is not None
                assert about.state.value == "ready", about
                newest = version
                time.sleep(0.1)  # or two more versions come while a request travels
        finally:
            done.set()
        for each in clients:
            each.result()

    assert len(answers) >= 0.9 * SWAPS
    assert all(len(tokens) == 1 for tokens in answers.values()), "one name, two answers"
    for version in sorted(answers)[:: len(answers) // 10]:
        (tokens,) = answers[version]
        adapter = _write(tmp_path / str(version), adapters[version - 1])
        assert list(tokens) == true_tokens(base, adapter, PROMPT, len(tokens))
    (tokens,) = unadapted  # also beside adapters, and with every slot filled
    assert list(tokens) == true_tokens(base, None, PROMPT, len(tokens))
    distinct = {next(iter(tokens)) for tokens in answers.values()}
    assert len(distinct) >= 0.9 * len(answers)
    print(f"{served.total()} requests, slowest {slowest_s:.2f} s")
    assert slowest_s < LONGEST_PAUSE_S
    assert len(server.status().runs[run.run_id].ready) == WINDOW
    wait_until(lambda: len(set(re.findall(r"swaps-v\d+", server.text("/metrics")))) <= WINDOW)
    log = server.log.read_text()
    assert "staged adapters are what vLLM loads" in log
    assert "staging is off" not in log
    assert "adapters of this layout are read in one piece from now on" in log
    assert "adapters of this layout are staged in one piece from now on" in log


def _write(folder: Path, made: MadeAdapter) -> Path:
    """The adapter as PEFT reads it; the writer has deleted most versions from the bucket."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(made[0])
    (folder / "adapter_config.json").write_text(json.dumps(made[1]))
    return folder
