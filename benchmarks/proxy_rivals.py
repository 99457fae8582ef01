"""Starts what the proxy is measured beside: its floor, nginx, vllm-router, sglang-router, a recipe.

Each is looked for on the PATH (or where an option says); what is absent is reported, not replaced.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import free_port

START_S = 30.0

NGINX_CONF = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    keepalive_requests 100000000; client_body_buffer_size 64k;
    upstream replicas {{ {servers} keepalive 1024; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@dataclass
class Target:
    """Something that can be measured."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    pids: list[int] = field(default_factory=list)


def start_ours(ports: list[int]) -> Target:
    """Start the proxy and wait until all replicas are in rotation."""
    port = free_port()
    replicas = [word for other in ports for word in ("--replica", f"http://127.0.0.1:{other}")]
    target = _start(
        "proxy", port, [sys.executable, "-m", "bucket_lora_proxy", "--port", str(port), *replicas]
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        page = _get(port, "/metrics")
        if len(re.findall(r"replica_up\{.*\} 1\.0", page)) == len(ports):
            return target
        time.sleep(0.05)
    raise SystemExit("the replicas never joined")


def start_rival(
    name: str, program: str | None, ports: list[int], *, folder: Path, trial: bytes
) -> Target | None:
    """Start another proxy; ``None``, with a line that says why, if it cannot take part.

    Args:
        name: ``floor``, ``recipe``, ``nginx``, ``vllm-router`` or ``sglang-router``.
        program: where it is, if not on the PATH.
        ports: of the replicas.
        folder: for files that it needs.
        trial: body of a request that it has to answer.
    """
    port = free_port()
    urls = [f"http://127.0.0.1:{other}" for other in ports]
    if name in ("floor", "recipe"):
        if name == "recipe" and importlib.util.find_spec("aiohttp") is None:
            print("absent: recipe (pip install aiohttp)")
            return None
        script = str(Path(__file__).with_name(f"proxy_{name}.py"))
        command = [sys.executable, script, str(port), *map(str, ports)]
    else:
        found = shutil.which(program or name)
        if found is None:
            print(f"absent: {name} (not on the PATH; give --{name} PROGRAM)")
            return None
        if name == "nginx":
            conf = folder / "nginx.conf"
            servers = " ".join(f"server 127.0.0.1:{other};" for other in ports)
            conf.write_text(NGINX_CONF.format(folder=folder, servers=servers, port=port))
            command = [found, "-p", str(folder), "-e", f"{folder}/error.log", "-c", str(conf)]
        else:
            launch = ["launch"] if name == "sglang-router" and _has_launch(found) else []
            quiet = ["--log-level", "error", "--prometheus-port", str(free_port())]
            route = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
            command = [found, *launch, "--worker-urls", *urls, *route, *quiet]
    target = _start(name, port, command)
    time.sleep(0.5)
    if refusal := _refusal(target, trial):
        print(f"absent: {name} does not serve such requests: {refusal}")
        with stopping([target]):
            return None
    return target


def _has_launch(program: str) -> bool:
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return "launch" in shown.stdout


@contextmanager
def stopping(targets: list[Target]) -> Iterator[None]:
    """Stop them all afterwards."""
    try:
        yield
    finally:
        for target in targets:
            if target.process is not None:
                target.process.terminate()
        for target in targets:
            if target.process is not None:
                try:
                    target.process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    target.process.kill()
                    target.process.wait()


def _start(name: str, port: int, command: list[str]) -> Target:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    target = Target(name, port, process)
    _until_open(target)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    target.pids = [process.pid, *map(int, children)]
    return target


def _until_open(target: Target) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert target.process is not None
        if target.process.poll() is not None:
            raise SystemExit(f"{target.name} ended with {target.process.returncode}")
        try:
            _get(target.port, "/health")
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"{target.name} did not start within {START_S:g} s")


def _refusal(target: Target, trial: bytes) -> str | None:
    deadline = time.monotonic() + START_S
    while True:
        request = urllib.request.Request(
            f"http://127.0.0.1:{target.port}/v1/completions",
            data=trial,
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            return None
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or time.monotonic() > deadline:
                return str(error)
            time.sleep(0.2)


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text
