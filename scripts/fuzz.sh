#!/bin/sh
# Runs every fuzz target of build/fuzz, two at a time: scripts/fuzz.sh [SECONDS, 60 by default] [target…]
#
# Findings lie in build/fuzz/findings as crash-*, timeout-*, oom-* and leak-*; `build/fuzz/TARGET FILE` repeats one.
set -eu
seconds=${1:-60}
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/.."
out=build/fuzz
mkdir -p "$out/findings"
if [ $# -eq 0 ]; then
    set -- $(cd "$out" && ls -- *_fuzz)
fi

# Fork mode goes on after a finding. Plans want long inputs from the start; grammars are text.
run() {
    name=$1
    corpus=$out/corpus/${name%_fuzz}
    seeds=tests/fuzz/${name%_fuzz}_seeds
    mkdir -p "$corpus"
    [ -d "$seeds" ] || seeds=
    "$out/$name" -fork=1 -ignore_crashes=1 -ignore_timeouts=1 -ignore_ooms=1 -max_total_time="$seconds" -len_control=10 \
        -max_len=1024 -timeout=60 -rss_limit_mb=4096 -artifact_prefix="$out/findings/$name-" "$corpus" $seeds \
        >"$out/$name.log" 2>&1 || true
    tail -n 1 "$out/$name.log"
}

n=0
for name; do
    run "$name" &
    n=$((n + 1))
    if [ $((n % 2)) -eq 0 ]; then
        wait
    fi
done
wait
found=$(find "$out/findings" -type f | wc -l)
echo "fuzz: $* ran $seconds s each; $found findings in $out/findings"
[ "$found" -eq 0 ]
