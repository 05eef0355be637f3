#!/usr/bin/env bash
# Builds the `python` image: Python 3 with pip, venv and pytest, git. See ../debian.sh for how, and what it leaves.
#
#   images/python/build.sh [OUTPUT-DIRECTORY]
#   exuvia image build images/python                                       into the image store
#   exuvia image build images/python --packages gcc,libc6-dev,python3-dev   with a C compiler for packages that need one
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../debian.sh" "$here" "$@"
