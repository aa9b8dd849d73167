#!/bin/sh
# A first verdict without a model: judge shipped records of an agent before and after INT4.
#
# Installs the command `quantgate` with its six dependencies into .venv-demo, unless it is there. The verdict is a fail,
# which is what it should be, so that exit code (20) ends this with 0.
set -eu
cd "$(dirname "$0")/.."

bin=.venv-demo/bin
if [ ! -x $bin/quantgate ]; then
    rm -rf .venv-demo
    echo "demo: installing quantgate and its six dependencies into .venv-demo" >&2
    "${PYTHON:-python3}" -m venv .venv-demo
    $bin/python -m pip install -qq --disable-pip-version-check .
fi
set -- examples/first_verdict/agent examples/first_verdict/gptq-short --metric accuracy --metric completed \
    --bucket constraint_retention=0.06 --html demo.html
echo "quantgate compare $*"
code=0
$bin/quantgate compare "$@" || code=$?
echo "exit code $code: the candidate fails. demo.html is the same as a page, with the cases that flipped."
[ $code = 20 ]
