#!/bin/sh
# Runs buf, from npm at a pinned version, in protos/. Says so and succeeds where Node is missing: the protos still compile
# there (make gen), only their lint is skipped.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
version=1.75.0

if ! command -v npm >/dev/null 2>&1; then
  if [ -n "${CI:-}" ]; then
    echo "buf $*: Node is not installed: make test-deps" >&2
    exit 1
  fi
  echo "skipped: buf $* (Node is not installed: apt-get install nodejs npm)"
  exit 0
fi
if [ ! -x "$root/node_modules/.bin/buf" ] || [ "$("$root/node_modules/.bin/buf" --version)" != "$version" ]; then
  echo "installing @bufbuild/buf $version from npm …"
  if ! npm install --prefix "$root" --no-save --no-package-lock --no-audit --no-fund --loglevel=error "@bufbuild/buf@$version"; then
    if [ -n "${CI:-}" ]; then exit 1; fi
    echo "skipped: buf $* (npm could not install it; is the network reachable?)"
    exit 0
  fi
fi
cd "$root/protos"
exec "$root/node_modules/.bin/buf" "$@"
