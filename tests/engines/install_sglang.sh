#!/bin/sh
# `sh tests/engines/install_sglang.sh VENV [PYTHON]`, in the repository: SGLang for the CPU and kvstore in a venv of
# their own, 2.8 GiB. SGLang's own dependencies are for CUDA; torchvision is, too, and the tests' shim lets it import.
set -eu
venv=$1
"${2:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade 'pip>=25.1'
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet --requirement tests/engines/sglang_requirements.txt
"$venv/bin/pip" install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0
"$venv/bin/pip" install --quiet --group build
"$venv/bin/pip" install --quiet --no-build-isolation --editable .
