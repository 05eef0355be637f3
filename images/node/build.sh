#!/usr/bin/env bash
# Builds the `node` image: Node.js with npm, git. See ../debian.sh for how, and what it leaves.
#
#   images/node/build.sh [OUTPUT-DIRECTORY]
#   exuvia image build images/node                                  into the image store
#   exuvia image build images/node --packages python3,g++,make       with what node-gyp needs
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../debian.sh" "$here" "$@"
