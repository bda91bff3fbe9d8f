#!/usr/bin/env bash
# From nothing to the page of a model of transformers: clone, install, optimize, look.
#
#   bash examples/newcomer.sh [REPOSITORY [PYTHON]]
#
# REPOSITORY is what `git clone` takes: by default the checkout that this file is in. PYTHON is an interpreter that has
# the packages of requirements.lock: by default `make` builds one, which downloads them.
set -euo pipefail
repository=${1:-file://$(cd "$(dirname "$0")/.." && pwd)}
work=$(mktemp -d "${TMPDIR:-/tmp}/fxopt-newcomer.XXXXXX")
cd "$work"

git clone --quiet --depth 1 "$repository" fxopt
if [ -n "${2:-}" ]; then
    python=$2
    export PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH} # the checkout is the package
else
    make --silent -C fxopt .venv/.ready
    python=$work/fxopt/.venv/bin/python
fi

cat >small_bert.py <<'PYTHON'
from transformers import BertConfig


def config():
    return BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=1000)
PYTHON

"$python" -m fxopt optimize small_bert.py:config --report bert.html
echo "now open $work/bert.html"
