# Sourced by scripts/test, scripts/docs and scripts/demo: goes to the repository root, makes .venv where it is missing or where its
# requirements have changed, and puts it first on PATH. PYTHON chooses the interpreter, default python3.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

requirements=$(cat constraints.txt pyproject.toml | cksum)
if [ "$(cat .venv/installed 2>/dev/null)" != "$requirements" ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"needs Python 3.10 or newer, found {sys.version}")'
    echo "installing into .venv (a few minutes, once)"
    [ -x .venv/bin/pip ] || "$python" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
    .venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
    echo "$requirements" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
