# The trainer, with the proxy to run beside it. Build in the repository's root:
#   docker build -f deploy/docker/trainer.Dockerfile -t bucket-lora-trainer:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY adapter_bucket adapter_bucket
COPY trl_async_bucket trl_async_bucket
COPY vllm_bucket_lora vllm_bucket_lora
COPY proxy proxy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# A C compiler: Triton compiles its launchers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
# torch from the package index brings its own CUDA libraries; the host needs the driver only.
RUN wheel="$(ls /wheels/*.whl)" && pip install --no-cache-dir "${wheel}[trl,proxy]"
RUN useradd --create-home --uid 10001 trainer
USER 10001
WORKDIR /home/trainer
# exec form, and no shell in between: SIGTERM must reach the trainer (docs/preemption.md).
ENTRYPOINT ["python"]
CMD ["-m", "trl_async_bucket", "run", "--help"]
