#!/bin/bash
# A real SGLang on a CPU, and sglang-router, in FOLDER/venv: Python 3.11, PyPI, 3.5 GB, two to five minutes. Again: nothing.
# usage: tests/real/setup.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
SGLANG=0.5.23 ROUTER=0.3.2 TORCH=2.13.0
stamp="sglang $SGLANG, router $ROUTER"
python=venv/bin/python

pip() { $python -m pip --disable-pip-version-check -q install "$@"; }

if [ "$(cat venv/.headrace 2> /dev/null)" = "$stamp" ]; then exit 0; fi
if ! $python -c 'import importlib.metadata as m; assert m.version("sglang") == "'$SGLANG'"' 2> /dev/null; then
  python3.11 -m venv venv
  pip "torch==$TORCH"
  # What SGLang's CPU path imports; the rest of its requirements are kernels for GPUs.
  pip "torch==$TORCH" transformers==5.19.0 tokenizers==0.23.2 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 numba==0.65.1 \
    openai==2.8.0 openai-harmony==0.0.4 outlines==0.1.11 'llguidance>=1.7.6,<2.0.0' 'kernels>=0.14.1,<0.15' 'uvicorn>=0.51' \
    sentencepiece==0.2.1 soundfile==0.13.1 blobfile==3.0.0 'prometheus-client>=0.20.0' aiohttp anthropic build datasets distro \
    easydict einops fastapi gguf interegular ipython mistral_common msgspec ninja numpy nvidia-ml-py orjson packaging \
    partial_json_parser pillow psutil py-spy pybase64 pydantic python-multipart pyzmq regex requests scipy setproctitle \
    tiktoken tqdm triton uvloop watchfiles xxhash zstandard
  pip --no-deps "sglang==$SGLANG" xgrammar==0.2.7 deepseek-recipe==0.2.0 tml-renderers==0.1.0 'smg-grpc-servicer>=0.9.0' \
    cuda-python modelscope torch_memory_saver
fi
pip --no-deps "sglang-router==$ROUTER"
pip click opentelemetry-api
site=$($python -c 'import site; print(site.getsitepackages()[0])')
rm -f "$site"/*sgl_cpu_stubs*
cp "$here/cpu_stubs.py" "$site/headrace_cpu_stubs.py"
echo 'import headrace_cpu_stubs' > "$site/headrace_cpu_stubs.pth"
$python -c 'import sglang, sglang_router, torch; print("ready:", sglang.__version__, torch.__version__)'
echo "$stamp" > venv/.headrace
