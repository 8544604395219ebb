# Sourced by the other scripts: creates .venv in the repository and installs titan into it. Needs Python >= 3.11, pip, venv.
# Environment: PYTHON (the interpreter that creates .venv; default python3); TITAN_ENVIRONMENT (a virtual environment that
# has titan already: nothing is created or installed).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1
if [ -n "${TITAN_ENVIRONMENT:-}" ]; then
    PATH="$TITAN_ENVIRONMENT/bin:$PATH"
    return
fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: titan needs Python 3.11 or newer, and $python is $("$python" --version 2>&1)" >&2
    echo "try: PYTHON=python3.12 $0" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv

# Install again only if the requirements change.
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing into .venv (a few minutes the first time)" >&2
    install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
    # torch first and alone: as a dependency of another package pip could choose a newer, much larger build.
    "${install[@]}" "$(grep '^torch==' constraints.txt)"
    "${install[@]}" --editable '.[test,torchtune]'
    echo "$wanted" > .venv/installed
fi
PATH="$PWD/.venv/bin:$PATH"
