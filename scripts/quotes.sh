#!/bin/sh
# Checks that Cython files use double quotes. The tool can only repair, so it gets copies.
set -eu
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
cp "$@" "$scratch"
double-quote-cython-strings "$scratch"/*
