#!/bin/sh
# A first verdict without a model: judge shipped records of an agent before and after INT4.
#
# Puts the command `quantgate` and its six dependencies into .venv-demo, unless they are there. The verdict is a fail,
# which is what it should be, so that exit code (20) ends this with 0.
set -eu
cd "$(dirname "$0")/.."

python=.venv-demo/bin/python
if [ ! -e .venv-demo/ready ]; then
    rm -rf .venv-demo
    echo "demo: installing the six dependencies of quantgate into .venv-demo" >&2
    "${PYTHON:-python3}" -m venv .venv-demo
    $python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' |
        $python -m pip install -qq --disable-pip-version-check -c constraints.txt -r /dev/stdin
    touch .venv-demo/ready
fi
install -m 755 scripts/quantgate .venv-demo/bin/quantgate
set -- examples/first_verdict/agent examples/first_verdict/gptq-short --metric accuracy --metric completed \
    --bucket constraint_retention=0.06 --html demo.html
echo ".venv-demo/bin/quantgate compare $*"
code=0
.venv-demo/bin/quantgate compare "$@" || code=$?
[ $code = 20 ] || { echo "demo: expected exit code 20, a verdict, got $code: see above" >&2; exit 1; }
echo "exit code $code: the candidate fails. demo.html is the same as a page, with the cases that flipped."
