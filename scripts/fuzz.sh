#!/bin/sh
# Runs every fuzz target of build/fuzz, two at a time: scripts/fuzz.sh [SECONDS, 60 by default] [target…]
#
# FUZZ_JOBS=3 runs three at a time. Findings lie in build/fuzz/findings as crash-*, timeout-*, oom-* and leak-*;
# `build/fuzz/TARGET FILE` repeats one.
set -eu
seconds=${1:-60}
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/.."
out=build/fuzz
jobs=${FUZZ_JOBS:-2}
mkdir -p "$out/findings"
if [ $# -eq 0 ]; then
    set -- $(cd "$out" && ls -- *_fuzz)
fi

# Goes on after a finding, in a new process. (libFuzzer's fork mode starts one every few seconds, and making the engines
# takes as long.) Plans want long inputs from the start; grammars are text.
run() {
    name=$1
    corpus=$out/corpus/${name%_fuzz}
    seeds=tests/fuzz/${name%_fuzz}_seeds
    mkdir -p "$corpus"
    [ -d "$seeds" ] || seeds=
    : >"$out/$name.log"
    end=$(($(date +%s) + seconds))
    while left=$((end - $(date +%s))) && [ "$left" -gt 0 ]; do
        "$out/$name" -max_total_time="$left" -len_control=10 -max_len=1024 -timeout=60 -rss_limit_mb=4096 \
            -print_final_stats=1 -artifact_prefix="$out/findings/$name-" "$corpus" $seeds >>"$out/$name.log" 2>&1 || true
    done
    sum=$(awk '/number_of_executed_units/ { n += $2 } END { print n + 0 }' "$out/$name.log")
    covered=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$out/$name.log" | sort -n | tail -n 1)
    echo "$name: $sum inputs, $covered edges covered"
}

n=0
for name; do
    run "$name" &
    n=$((n + 1))
    if [ $((n % jobs)) -eq 0 ]; then
        wait
    fi
done
wait
found=$(find "$out/findings" -type f ! -name '*slow-unit*' | wc -l)
echo "fuzz: $* ran $seconds s each; $found findings in $out/findings"
[ "$found" -eq 0 ]
