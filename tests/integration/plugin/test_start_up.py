"""Mistakes on the command line of a real ``vllm serve`` stop it before it loads anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import free_port
from tests.integration.plugin.server import command, environment

pytestmark = pytest.mark.slow

LIMIT_S = 280.0
"""A tenth of it is usual; importing vLLM takes eight seconds of a core, which others may want."""

ON = ("--enable-lora", "--plugin=bucket-lora")

# vLLM's own parser, as `vllm serve` builds it; importing it takes seconds, so once for all cases.
PARSE = """
import contextlib, io, json, multiprocessing, os, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

answers = {}
for name, flags in json.loads(sys.argv[1]).items():
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            args = parser.parse_args(["serve", "model", *flags])
            answers[name] = f"ok {args.bucket_lora_runs}" if hasattr(args, "plugin") else "ok"
        except SystemExit as stop:
            answers[name] = f"exit {stop.code}: {error.getvalue().strip().splitlines()[-1]}"
def hooked(told):
    from vllm.lora.worker_manager import WorkerLoRAManager
    told.put(hasattr(WorkerLoRAManager._load_adapter, "_bucket_lora"))
context = multiprocessing.get_context("fork")
told = context.SimpleQueue()
engine = context.Process(target=hooked, args=(told,))
engine.start()
plugins = os.environ.get("VLLM_PLUGINS")
print(json.dumps({"answers": answers, "plugins": plugins, "forked": told.get()}))
engine.join()
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("start-up")
    bucket = f"--bucket-lora-url=file://{folder}"
    (folder / "serve.yaml").write_text(
        "enable-lora: true\nplugin: bucket-lora\nbucket-lora-runs: y*\n"
    )
    cases = {
        "no plugin": ["--enable-lora"],
        "no url": [*ON],
        "no lora": ["--plugin=bucket-lora", bucket],
        "scheme": [*ON, "--bucket-lora-url=ftp://host/dir"],
        "missing bucket": [*ON, f"--bucket-lora-url=file://{folder}/no/such/dir"],
        "no credentials": [*ON, "--bucket-lora-url=s3://some-bucket/prefix"],
        "typo in plugin": ["--enable-lora", "--plugin=bucketlora", bucket],
        "typo in flag": [*ON, bucket, "--bucket-lora-pol-s=1"],
        "flag without plugin": ["--enable-lora", bucket],
        "value": [*ON, bucket, "--bucket-lora-poll-s=soon"],
        "good": [*ON, bucket, "--bucket-lora-runs=mine-*"],
        "good config": ["--config", f"{folder}/serve.yaml", bucket],
    }
    env = environment(
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=str(folder / "none"),
        AWS_SHARED_CREDENTIALS_FILE=str(folder / "none"),
    )
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(cases)],
        env={name: value for name, value in env.items() if name not in AWS_KEYS},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    document = json.loads(done.stdout.splitlines()[-1])
    answers: dict[str, str] = document["answers"]
    answers["VLLM_PLUGINS"] = document["plugins"]
    answers["a forked engine has the hooks"] = str(document["forked"])
    return answers


AWS_KEYS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no url", "--bucket-lora-url URL or set BUCKET_LORA_URL"),
        ("no lora", "--enable-lora"),
        ("scheme", "'ftp'"),
        ("missing bucket", "no/such"),
        ("no credentials", "AWS_ACCESS_KEY_ID"),
        ("typo in plugin", "bucketlora"),
        ("typo in flag", "--bucket-lora-pol-s"),
        ("flag without plugin", "--plugin bucket-lora"),
        ("value", "--bucket-lora-poll-s='soon'"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(parsed: dict[str, str], case: str, said: str) -> None:
    assert parsed[case].startswith("exit 2: "), parsed[case]
    assert said in parsed[case]


def test_flags_are_read_from_the_line_and_from_a_file(parsed: dict[str, str]) -> None:
    assert parsed["no plugin"] == "ok"
    assert parsed["good"] == "ok mine-*"
    assert parsed["good config"] == "ok y*"


def test_other_plugins_stay_allowed(parsed: dict[str, str]) -> None:
    allowed = parsed["VLLM_PLUGINS"].split(",")
    assert "bucket-lora" in allowed
    assert "lora_filesystem_resolver" in allowed


def test_a_forked_engine_checks_modules_too(parsed: dict[str, str]) -> None:
    """Forked from a process whose plugins are loaded, it loads none; an ``LLM`` does so on GPUs."""
    assert parsed["a forked engine has the hooks"] == "True"


def test_the_real_command_ends_before_it_loads_a_model(tmp_path: Path) -> None:
    done = subprocess.run(
        command("no-such-model", free_port(), ["--plugin=bucket-lora"]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("without --enable-lora; add it")
