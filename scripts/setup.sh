#!/bin/sh
# Make .venv hold what requirements.txt and constraints.txt ask for; do nothing when it already does.
#
# Uses uv where it is on PATH and pip otherwise. torch goes first and alone, because PyPI's torch for
# Linux brings gigabytes of CUDA libraries that a CPU run never touches:
#   1. QUANTGATE_TORCH_INDEX, when set, is the package index to take torch from, for example
#      https://download.pytorch.org/whl/cu130 on a GPU machine, or https://pypi.org/simple; that of the last
#      time stays until another is named (an empty one ends that);
#   2. else a torch wheel in one of pip's find-links folders is used;
#   3. else, on Linux, PyTorch's CPU index; elsewhere the ordinary index, whose torch is CPU-only.
# Other settings: PYTHON (the interpreter to build on) and QUANTGATE_NO_UV=1 (use pip even so).
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/installed.txt
cpu_index=https://download.pytorch.org/whl/cpu

# else the next command, which does not name it, would put torch for CPUs in its place
QUANTGATE_TORCH_INDEX=${QUANTGATE_TORCH_INDEX-$(sed -n 2p $stamp 2>/dev/null || true)}

wanted() { # everything the environment depends on; the folder too, as scripts in it hold its path
    pwd
    echo "$QUANTGATE_TORCH_INDEX"
    cat requirements.txt constraints.txt scripts/setup.sh
}

say() { echo "setup: $*" >&2; }

if [ -x $venv/bin/python ] && wanted | cmp -s - $stamp; then
    exit 0
fi

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() { # not that of a virtual environment: ours may be first on PATH, and is removed
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if is_recent "$name"; then
            "$name" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
}

pip_setting() { # pip_setting find-links: pip's environment variable, else its configuration files
    value=$(printenv "PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')" || true)
    for section in install global; do
        [ -n "$value" ] || value=$(printf '%s\n' "$pip_config" | sed -n "s/^$section\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g')
    done
    printf '%s' "$value"
}

uv_sources() { # uv reads none of pip's settings: hand them over
    for place in $(pip_setting find-links); do printf ' --find-links %s' "$place"; done
    for place in $(pip_setting index-url); do printf ' --default-index %s' "$place"; done
    for place in $(pip_setting extra-index-url); do printf ' --index %s' "$place"; done
}

torch_source() {
    if [ -n "$QUANTGATE_TORCH_INDEX" ]; then
        printf '%s' "--index-url $QUANTGATE_TORCH_INDEX"
        return
    fi
    version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.txt)
    for place in $(pip_setting find-links); do
        if ls "${place#file://}"/torch-"$version"[-+]*.whl >/dev/null 2>&1; then
            printf '%s' "--no-index --find-links $place"
            return
        fi
    done
    if [ "$(uname -s)" = Linux ]; then
        printf '%s' "--index-url $cpu_index"
    fi
}

make_venv_and_install() { # make_venv_and_install uv|pip
    rm -rf $venv
    if [ "$1" = uv ]; then
        certificates=$(pip_setting cert)
        [ -z "$certificates" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"
        uv venv --quiet --python "${python:->=3.11}" $venv || return 1
        install="uv pip install --quiet --python $venv/bin/python"
        sources="--index-strategy unsafe-best-match$(uv_sources)"
    else
        "$python" -m venv $venv || return 1
        # --no-compile: as uv does, leave bytecode to the first import; most files are never imported
        install="$venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile"
        sources=
    fi
    say "installing torch ($(torch_source))"
    # --no-deps: PyTorch's indexes carry other versions of torch's dependencies than constraints.txt
    # shellcheck disable=SC2046,SC2086  # options are meant to be split
    if ! $install -c constraints.txt --no-deps $(torch_source) torch; then
        [ -z "$QUANTGATE_TORCH_INDEX" ] || return 1
        say "that source has no torch for this machine; taking it from the ordinary index"
        $install -c constraints.txt $sources torch || return 1
    fi
    say "installing the rest of requirements.txt with $1"
    # shellcheck disable=SC2086
    $install -c constraints.txt $sources -r requirements.txt
}

python=$(find_python)
pip_config=$([ -z "$python" ] || "$python" -m pip config list 2>/dev/null || true)
if command -v uv >/dev/null 2>&1 && [ -z "${QUANTGATE_NO_UV:-}" ]; then
    if ! make_venv_and_install uv; then
        [ -n "$python" ] || { say "uv failed, and there is no Python 3.11 or newer for pip"; exit 1; }
        say "uv failed; trying pip"
        make_venv_and_install pip
    fi
elif [ -n "$python" ]; then
    make_venv_and_install pip
else
    say "expected Python 3.11 or newer (or uv) on PATH, found neither; set PYTHON to its path"
    exit 1
fi
wanted >$stamp
say "ready: $($venv/bin/python --version) in $venv"
