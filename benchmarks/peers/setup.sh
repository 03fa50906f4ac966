#!/bin/sh
# A virtual environment per peer, from PyPI, apart from ours, one after the other: one that fails leaves the others.
# usage: benchmarks/peers/setup.sh DIR [PEER...]
# About 4 GB with a torch for CPUs (where pip finds one: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS), else more.
set -u
dir=$1
shift
failed=

venv() { # NAME REQUIREMENT...
  name=$1
  shift
  case " $wanted " in *" $name "*) ;; *) return 0 ;; esac
  if python3 -m venv "$dir/$name" && "$dir/$name/bin/python" -m pip -q --disable-pip-version-check install "$@"; then
    echo "$name: installed $*"
  else
    echo "$name: could not be installed" >&2
    failed=yes
  fi
}

wanted=${*:-flexllm async-batch-llm datatrove distilabel bespokelabs-curator speculators}
venv flexllm flexllm==0.17.10
venv async-batch-llm 'async-batch-llm[openai]==0.28.0'
# Its extra `inference` brings vllm and sglang; this is the rest of it, and the client of its `endpoint`.
venv datatrove 'datatrove[io]==0.10.1' aiofiles httpx aiosqlite 'numpy<2.3' openai
# It imports requests and does not ask for it.
venv distilabel 'distilabel[openai]==1.5.3' requests
venv bespokelabs-curator bespokelabs-curator==0.1.31
# Its command imports torch. The torchvision and torchaudio that it asks for are not called here, and PyPI's cannot be
# imported beside a torch for CPUs; so what it does need, by name, and then itself alone.
venv speculators torch==2.13.0 transformers==5.19.0 'datasets>=4.0.0,<=5.1.0' 'loguru>=0.7.2,<=0.7.3' 'openai>=2.0.0' \
  aiohttp click httpx huggingface-hub numpy protobuf psutil pydantic pydantic-settings rich safetensors tqdm typer \
  && venv speculators --no-deps speculators==0.9.0 hs-connectors==0.9.0
[ -z "$failed" ]
