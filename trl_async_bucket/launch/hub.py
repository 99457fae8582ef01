"""The Hub's API as the launcher needs it. The only module that touches ``huggingface_hub``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from huggingface_hub import HfApi, Volume, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError

from adapter_bucket.errors import BucketError, ConfigError
from trl_async_bucket.launch.job_plan import LAUNCH_LABEL, MOUNT_PATH, BucketMount, Job

CALL_TIMEOUT_S = 60.0
"""The Hub's client waits for ever by default, and a signal could then not stop a launch."""
HEALTH_TIMEOUT_S = 10.0

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_HOURS = {"second": 3600.0, "minute": 60.0, "hour": 1.0}

HUB_FAULTS = (HfHubHTTPError, httpx.HTTPError)


class LaunchError(BucketError):
    """A launch failed; the message says at what, and every started job is cancelled."""


@dataclass(frozen=True)
class JobState:
    """What the Hub says of a job."""

    id: str
    stage: str
    message: str
    url: str
    """Its page, for people."""
    exposed: str | None
    """Where its port is reached."""

    @property
    def ended(self) -> bool:
        return self.stage in ENDED


class Hub:
    """Jobs of one launch."""

    def __init__(
        self, namespace: str | None, launch_id: str, *, endpoint: str | None = None
    ) -> None:
        """Log in.

        Args:
            namespace: Whose jobs they are; ``None``: the token's user.
            launch_id: Value of the label that all jobs of this launch carry.
            endpoint: Of the Hub; ``None``: ``HF_ENDPOINT``, or the public one.

        Raises:
            ConfigError: there is no token on this machine, or the Hub refuses it.
        """
        token = get_token()
        if not token:
            raise ConfigError("no Hugging Face token: set HF_TOKEN, or run: hf auth login")
        self.token = token
        self._api = HfApi(endpoint=endpoint, token=token)
        self._labels = {LAUNCH_LABEL: launch_id}
        get_session().timeout = httpx.Timeout(CALL_TIMEOUT_S)
        try:
            self.namespace = namespace or str(self._api.whoami()["name"])
        except HUB_FAULTS as error:
            raise ConfigError(f"the Hub does not take the token: {error}") from None

    def make_bucket(self, bucket: BucketMount) -> None:
        """Make the bucket, private, unless it is there."""
        self._api.create_bucket(bucket.source, private=True, exist_ok=True)

    def start(self, job: Job, secrets: Mapping[str, str]) -> JobState:
        """Start a job."""
        volumes = None
        if job.mount is not None:
            volumes = [
                Volume(
                    type="bucket", source=job.mount.source, mount_path=MOUNT_PATH,
                    path=job.mount.path,
                )
            ]  # fmt: skip
        info = self._api.run_job(
            image=job.image,
            command=list(job.command),
            env=dict(job.env),
            secrets={name: secrets[name] for name in job.secret_names},
            flavor=job.flavor,
            timeout=job.timeout,
            labels={**self._labels, "name": job.name},
            volumes=volumes,
            expose=list(job.expose) or None,
            namespace=self.namespace,
        )
        return _state(info)

    def state(self, job_id: str) -> JobState:
        """Ask for a job's state."""
        return _state(self._api.inspect_job(job_id=job_id, namespace=self.namespace))

    def logs(self, job_id: str) -> Iterator[str]:
        """Lines of its log, until the job ends."""
        yield from self._api.fetch_job_logs(job_id=job_id, namespace=self.namespace, follow=True)

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        self._api.cancel_job(job_id=job_id, namespace=self.namespace)

    def running(self) -> list[JobState]:
        """Jobs of this launch that have not ended, however they were started."""
        found = self._api.list_jobs(labels=self._labels, namespace=self.namespace)
        return [state for state in map(_state, found) if not state.ended]

    def is_healthy(self, exposed: str) -> bool:
        """Whether a job's server answers ``/health`` with 200.

        The token is needed to reach it; it is sent over TLS only, and follows no redirect.
        """
        if urlsplit(exposed).scheme != "https" and not self._api.endpoint.startswith("http://"):
            raise LaunchError(f"the Hub names {exposed} as a job's address, which is not https")
        try:
            answer = get_session().get(
                f"{exposed.rstrip('/')}/health",
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=HEALTH_TIMEOUT_S,
                follow_redirects=False,
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def hourly_prices(self) -> dict[str, float]:
        """US dollars an hour by flavor."""
        return {
            row.name: row.unit_cost_usd * _HOURS[row.unit_label]
            for row in self._api.list_jobs_hardware()
            if row.unit_label in _HOURS
        }


def _state(info: Any) -> JobState:
    exposed = info.status.expose_urls or []
    return JobState(
        id=str(info.id),
        stage=str(getattr(info.status.stage, "value", info.status.stage)),
        message=info.status.message or "",
        url=str(info.url),
        exposed=str(exposed[0]) if exposed else None,
    )
