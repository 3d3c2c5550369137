#!/usr/bin/env bash
# Build and check a release; publish nothing (docs/contributing/release.md). `make release` runs it.
#
#   VERSION         the version to release (default: that of pyproject.toml)
#   PYTHON          an interpreter with build and twine; make sets it
#   IMAGE_BUILDER   buildah or docker (default: the one found; empty: no image)
#   PYTHON_IMAGE    the base image (default: that of the Dockerfile)
set -euo pipefail
cd "$(dirname "$0")/.."

current=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
version=${VERSION:-$current}
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$scratch"' EXIT

sed -i "s/^version = \"$current\"$/version = \"$version\"/" pyproject.toml
sed -i "s/^\( *newTag: \).*/\1$version/" deploy/kubernetes/kustomization.yaml
if ! grep -q "^## \[$version\] - " CHANGELOG.md; then
    sed -i "s/^## \[Unreleased\]$/&\n\n## [$version] - $(date -u +%F)/" CHANGELOG.md
fi

rm -rf dist
"${PYTHON:-.venv/bin/python}" -m build --outdir dist >"$scratch/build.log" || { cat "$scratch/build.log" && exit 1; }
"${PYTHON:-.venv/bin/python}" -m twine check --strict dist/*

# The wheel alone, without torch, in an environment outside this checkout.
unset PYTHONPATH
for python in python3.11 python3.12 python3.13 python3.14; do
    if ! "$python" --version >/dev/null 2>&1; then
        echo "SKIPPED $python: not on this machine"
        continue
    fi
    bin=$scratch/$python/bin log=$scratch/$python.log
    "$python" -m venv "$scratch/$python"
    "$bin/pip" install --quiet --disable-pip-version-check dist/*.whl
    "$bin/lighthouse" serve --bind 127.0.0.1:0 --http 127.0.0.1:0 --journal none 2>"$log" &
    server=$!
    timeout 60 sh -c "until grep -q 127.0.0.1: '$log'; do sleep 0.2; done"
    "$bin/lighthouse" status --lighthouse "$(grep -o -m 1 '127\.0\.0\.1:[0-9]*' "$log" | head -n 1)"
    "$bin/lighthouse-manager" --version
    kill "$server" && wait "$server"
    server=
    echo "PASSED $python"
done

builder=${IMAGE_BUILDER-$(command -v buildah || command -v docker || echo)}
if [ -n "$builder" ]; then
    "$builder" build ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} --tag "lighthouse-ft:$version" .
else
    echo "SKIPPED image: no buildah or docker"
fi
ls -l dist
