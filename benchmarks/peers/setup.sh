#!/bin/sh
# A virtual environment per peer, from PyPI, apart from ours: benchmarks/peers/setup.sh DIR
set -eu
for peer in flexllm==0.17.10; do
  python3 -m venv "$1/${peer%%==*}"
  "$1/${peer%%==*}/bin/python" -m pip -q --disable-pip-version-check install "$peer"
done
