# Sourced by scripts/test, scripts/docs and scripts/demo: goes to the repository root, makes an environment where it is missing or where
# its requirements have changed, and puts it first on PATH. PYTHON chooses the interpreter, default python3. VERSIONS chooses the
# releases: pinned (default, those of constraints.txt), or the oldest or newest that pyproject.toml allows.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

versions=${VERSIONS:-pinned}
environment=.venv-$versions
case $versions in
    pinned) environment=.venv constraints=$(cat constraints.txt) ;;
    newest) constraints="" ;;
    oldest) constraints=$(grep -oE '"[a-z-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' | sort -u) ;;
    *) echo "VERSIONS must be pinned, oldest or newest, got $versions" >&2 && exit 2 ;;
esac
requirements=$(cat <(echo "$constraints") pyproject.toml | cksum)
if [ "$(cat $environment/installed 2>/dev/null)" != "$requirements" ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.version_info >= (3, 10) or sys.exit(f"needs Python 3.10 or newer, found {sys.version}")'
    echo "installing into $environment (a few minutes, once)"
    [ -x $environment/bin/pip ] || "$python" -m venv --clear $environment
    echo "$constraints" > $environment/constraints.txt
    $environment/bin/python -m pip install --quiet --no-compile -c $environment/constraints.txt -e '.[dev]'
    echo "$requirements" > $environment/installed
fi
export PATH="$PWD/$environment/bin:$PATH"
