# Source this where nothing can be installed: `. benchmarks/gpu/offline.sh PARTS`, from the root of
# the repository. PARTS holds archives site_*.tar.xz of a vLLM site for this machine's Python and
# torch. Afterwards `python3 -m benchmarks.gpu.…` runs, and vLLM finds the plugin.
site=${TMPDIR:-/tmp}/benchmark-site
mkdir -p "$site"
for part in "$1"/site_*.tar.xz; do tar xJf "$part" -C "$site" & done
wait
export PYTHONPATH="$PWD:$site"
python3 -m compileall -q -j 0 "$site" || true # else every process compiles what it imports
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.metadata "$site"
