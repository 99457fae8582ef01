"""A proxy's metrics page, served by whoever stands in for the proxy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

METRICS = """\
# HELP bucket_lora_proxy_members Replicas
bucket_lora_proxy_members{source="static",state="up"} 2.0
bucket_lora_proxy_members{source="static",state="down"} 1.0
bucket_lora_proxy_requests_total{status="200"} 40.0
bucket_lora_proxy_requests_total{status="503"} 2.0
bucket_lora_proxy_prompt_tokens_total 800.0
bucket_lora_proxy_matched_prompt_tokens_total 700.0
bucket_lora_proxy_in_flight{replica="http://a:1"} 3.0
bucket_lora_proxy_in_flight{replica="http://b:1"} 4.0
bucket_lora_proxy_run_lag_versions{run="run-1"} 2.0
bucket_lora_proxy_run_lag_versions{run="odd \\"name\\""} 9.0
process_open_fds 12.0
"""


@contextmanager
def metrics_server(answer: Callable[[str | None], tuple[int, str]]) -> Iterator[str]:
    """What a proxy's ``/metrics`` may answer, by the token that came."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer(self.headers["Authorization"])
            self.send_response(code)
            if code == 302:
                self.send_header("Location", body)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
