#!/bin/sh
# Runs the C tests and a Python stress test under AddressSanitizer and UndefinedBehaviorSanitizer; the hand-over of an
# engine between threads, and sampling on several threads, under ThreadSanitizer.
set -eu
cd "$(dirname "$0")/.."
python=${DRAFTHOUSE_PYTHON:-$PWD/.venv/bin/python}
scripts/instrument.sh address
scripts/instrument.sh thread
out=build/address
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
for model in tiny-mimo2-f16 tiny-qwen35-f16; do
    echo "== abi_test $model"
    "$out/abi_test" "models/$model.gguf"
    for drafts in none mtp ngram-mod ngram-cache; do
        echo "== step_bench $model $drafts"
        "$out/step_bench" --model "models/$model.gguf" --draft-type "$drafts" --prompts tests/fuzz/prompts.txt \
            --n-seq 4 --n-gen 24 --n-requests 12 --threads 1
    done
done
echo '== Python stress test'
# CPython and numpy keep memory until the end: leaks are not looked for.
packages=$PWD:$PWD/$out/python:$PWD/service:$PWD/clients/python
ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \
    PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -p no:cacheprovider --timeout 900 \
    tests/test_recurrent_rollback.py tests/test_rollback_by_hand.py tests/test_bad_input.py tests/test_ngram_guards.py \
    tests/test_bad_grammars.py tests/test_cext_snapshots.py
echo '== hand-over between threads'
build/thread/handover_test
echo '== sampling on several threads'
build/thread/sampling_test
echo 'sanitize: clean'
