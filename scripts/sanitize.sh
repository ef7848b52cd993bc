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
for program in attention_test rows_test; do
    echo "== $program"
    "$out/$program"
done
echo '== Python stress test'
# Without site (-S): an editable installation would import the engine without instrumentation, whatever the path says.
# CPython and numpy keep memory until the end: leaks are not looked for.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
run_python() {
    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
        LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
        PYTHONPATH=$PWD:$PWD/$out/python:$PWD/service:$PWD/clients/python:$site "$python" -S "$@"
}
case $(run_python -c 'import drafthouse_engine._spec as it; print(it.__file__)') in
"$PWD/$out"/*) ;;
*)
    echo 'Python did not import the engine with instrumentation' >&2
    exit 1
    ;;
esac
run_python -m pytest -q -p no:cacheprovider --timeout 900 \
    tests/cext/test_recurrent_rollback.py tests/cext/test_rollback_by_hand.py tests/rpc/test_bad_input.py tests/cext/test_ngram_guards.py \
    tests/cext/test_bad_grammars.py tests/cext/test_cext_snapshots.py tests/cext/test_turned_on.py tests/cext/test_given_drafts.py tests/cext/test_runs.py
echo '== hand-over between threads'
build/thread/handover_test
echo '== sampling on several threads'
build/thread/sampling_test
echo 'sanitize: clean'
