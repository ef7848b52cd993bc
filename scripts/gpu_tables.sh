#!/bin/sh
# Takes the tables of a machine with a GPU, in pieces of less than ten minutes.
#
#   scripts/gpu_tables.sh               the pieces that are not done yet, as many as fit into BUDGET seconds (540)
#   scripts/gpu_tables.sh NAME…         these pieces, done or not
#   scripts/gpu_tables.sh --list        all pieces, how long each may take, and whether it is done
#   scripts/gpu_tables.sh --dry-run     the commands of all pieces, or of those named; runs none of them
#   scripts/gpu_tables.sh --pack        on a machine with a network: what one without needs, into build/gpu-pack
#   scripts/gpu_tables.sh --pack --built    the same with engine and llama-server in place of the source, as scripts/cuda.py
#                                       has built them: the piece "build" takes seconds there
#
# Results are appended to gpu-tables.json and gpu-tables.md in the folder $OUT (build/gpu by default), which name the GPU;
# the first of them is also how a later call, or one on another machine, knows what is done. A build that does not get
# ready in its piece goes on in the next call. PEER=stock builds llama-server from the stock source in place of the one
# that shares the engine's CUDA objects, which takes half the time. ROUNDS (3) is for all tables, TESTERS (6) for how many
# tests run at once. The pieces stand in the order of their worth: where time is short, the first ones are those to have.
# Without a network: bring build/gpu-pack. Where it lies, source and packages come from it, and beside it the packages that
# $PYTHON has are used (SITE=1 does that alone). `--pack --python 3.12 --there numpy,cmake,ninja` says what is there.
set -eu
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
work=build/gpu
budget=${BUDGET:-540}
peer_kind=${PEER:-shared}
rounds=${ROUNDS:-3}
n_testers=${TESTERS:-6} # each has its own context on the GPU: about 600 MB
pack=${PACK:-build/gpu-pack}
case $pack in
/*) wheels=$pack/wheels ;;
*) wheels=$PWD/$pack/wheels ;;
esac
python=$(command -v "${PYTHON:-python3}") # before there is one in .venv
export PATH="$PWD/.venv/bin:$PATH"

is_built=
if [ "${1:-}" != --pack ] && [ -e "$pack/built.tar.xz" ]; then
    is_built=1 SITE=1
    LD_LIBRARY_PATH=$("$python" scripts/gpu_built.py libraries)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
elif [ "${1:-}" != --pack ] && [ -e "$pack/llama.cpp.tar.xz" ]; then
    # Absolute: CMake runs elsewhere.
    DRAFTHOUSE_LLAMA_CPP=${DRAFTHOUSE_LLAMA_CPP:-$PWD/$work/llama.cpp}
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels SITE=1
    export DRAFTHOUSE_LLAMA_CPP PIP_NO_INDEX PIP_FIND_LINKS
fi

pieces='build smoke peer models own-0.6b tests drafts prompts gap own-1.2b own-hybrid quants equal fresh'

# Seconds that a piece may take.
seconds_of() {
    case $1 in
    build) echo 530 ;;
    smoke) echo 60 ;;
    peer) echo 400 ;;
    models | prompts | drafts) echo 400 ;;
    quants | gap | fresh) echo 200 ;;
    *) echo 300 ;;
    esac
}

about() {
    case $1 in
    build) echo 'the engine with CUDA for this GPU, and what tests and benchmarks import' ;;
    smoke) echo 'the devices, and a text that the demo model writes there' ;;
    peer) echo "llama-server ($peer_kind)" ;;
    models) echo 'models with random weights' ;;
    tests) echo 'tokens of the GPU beside those of the CPU; the tests of make test-device' ;;
    own-*) echo "each side's own defaults, ${1#own-}, at all widths" ;;
    quants) echo "each side's own defaults, 0.6 B in Q8_0 and F16" ;;
    prompts) echo 'the same with prompts of 1,000 and 4,000 tokens' ;;
    equal) echo 'the same settings on both sides, 0.6 B' ;;
    drafts) echo 'MTP drafts of acceptance 0.4, 0.6, 0.8, and none' ;;
    gap) echo "the gap beside another tenant's prompt of 4,096 tokens" ;;
    fresh) echo 'a server that has just started beside one that has run' ;;
    esac
}

# The commands of a piece, a line each. @ is the file for its rows.
commands_of() {
    case $peer_kind in
    stock) peer=build/peers/cmake/bin/llama-server ;;
    *) peer=build/gpu/llama-server ;;
    esac
    peers="drafthouse-bench peers --peer $peer --rounds $rounds --json @"
    case $1 in
    build)
        # Unpacked apart first: a piece that is ended in between leaves no half of it.
        if [ "$is_built" ]; then
            echo "[ -d $work/built ] || { mkdir -p $work/part && \"$python\" -W ignore -m tarfile -e $pack/built.tar.xz $work/part &&\
 mv $work/part $work/built; }"
        elif [ -e "$pack/llama.cpp.tar.xz" ]; then
            echo "[ -d $work/llama.cpp ] || { mkdir -p $work/part && \"$python\" -W ignore -m tarfile -e $pack/llama.cpp.tar.xz $work/part &&\
 mv $work/part/llama.cpp $work/; }"
        fi
        if [ -n "${SITE:-}" ]; then
            # Where ensurepip is missing, as Debian has it, its own pip serves.
            cat <<'EOF' | sed "s,PYTHON,\"$python\",g"
[ -e .venv/bin/pip ] || PYTHON -m venv .venv || { PYTHON -m venv --without-pip .venv; printf '%s\n' '#!/bin/sh' 'exec "${0%pip}python" -m pip "$@"' >.venv/bin/pip; chmod +x .venv/bin/pip; }
EOF
            echo "\"$python\" -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])' \
>\$(echo .venv/lib/python3.*/site-packages)/site-of-python.pth"
        fi
        if [ "$is_built" ]; then
            echo "\"$python\" scripts/gpu_built.py link $work/built"
            return
        fi
        echo "\"$python\" scripts/build.py"
        echo "python -m pip install --quiet \$(\"$python\" scripts/gpu_results.py packages)"
        echo 'python -m pip install --quiet --no-deps --no-build-isolation --editable bench'
        ;;
    smoke) echo 'python scripts/gpu_smoke.py' ;;
    peer)
        if [ "$is_built" ]; then
            echo 'ln -sf built/bin/llama-server build/gpu/llama-server'
        elif [ "$peer_kind" = stock ]; then
            echo "\"$python\" scripts/peers.py"
        else
            echo 'cmake --build build/cp3*-linux_* --target llama-server'
            echo 'ln -sf ../../build/cp3*-linux_*/bin/llama-server build/gpu/llama-server'
        fi
        ;;
    models)
        # Side by side: each takes one core.
        echo '{ echo qwen3-0.6b-like --quants Q4_0; echo qwen3-0.6b-like --quants Q8_0; echo qwen3-0.6b-like --quants F16;' \
            'echo llama-1b-like --quants Q4_0; echo qwen35-0.8b-like --quants Q4_0; echo dense-0.6b --quants Q4_0; }' \
            '| xargs -P 6 -L 1 python -m models.bench_models'
        ;;
    tests)
        # Named as they end, so that a run that is cut off has told; and no plugin but ours: Python may have others.
        echo "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
        echo "python -m pytest -p xdist.plugin -p pytest_asyncio.plugin -p pytest_timeout -p _hypothesis_pytestplugin\
 -p tests.support.on_gpu -n $n_testers -p no:cacheprovider -v --tb=short -m 'not bench' tests/engine/test_gpu.py \$(make -s device-tests)"
        ;;
    own-0.6b) echo "$peers --scenarios defaults --models qwen3-0.6b-like-Q4_0 --streams 1,4,8,16,32" ;;
    own-1.2b) echo "$peers --scenarios defaults --models llama-1b-like-Q4_0 --streams 1,4,8,16,32" ;;
    own-hybrid) echo "$peers --scenarios defaults --models qwen35-0.8b-like-Q4_0 --streams 1,4,8,16,32" ;;
    quants) echo "$peers --scenarios defaults --models qwen3-0.6b-like-Q8_0,qwen3-0.6b-like-F16 --streams 1,8" ;;
    prompts)
        echo "$peers --scenarios defaults --models qwen3-0.6b-like-Q8_0,qwen3-0.6b-like-F16 --streams 1,8\
 --n-prompts 1000,4000"
        ;;
    equal) echo "$peers --scenarios closed --models qwen3-0.6b-like-Q4_0 --drafts none --streams 1,4,8,16,32" ;;
    drafts)
        echo "$peers --scenarios closed --models dense-0.6b-Q4_0 --drafts none,mtp --acceptances 0.4,0.6,0.8\
 --streams 1,8,32"
        ;;
    gap) echo "$peers --scenarios stall --stall-model dense-0.6b-Q4_0 --n-long 4096" ;;
    fresh) echo 'drafthouse-bench fresh --models qwen3-0.6b-like-Q4_0 --streams 1,8' ;;
    *)
        echo "there is no piece \"$1\"; --list shows all" >&2
        return 2
        ;;
    esac
}

results() {
    OUT=$out "$python" scripts/gpu_results.py "$@"
}

show() {
    results taken >"$work/taken"
    for piece in $pieces; do
        state=' '
        grep -qx "$piece" "$work/taken" && state=x
        printf '[%s] %-10s up to %3s s  %s\n' "$state" "$piece" "$(seconds_of "$piece")" "$(about "$piece")"
    done
}

# Says how to build, for the pieces that do: what is built already runs where there is no compiler.
set_cmake_args() {
    server=--server
    [ "$peer_kind" != stock ] || server=
    arguments=$("$python" scripts/cuda.py --print-args $server)
    CMAKE_ARGS="$arguments ${CMAKE_ARGS:-}"
    export CMAKE_ARGS
}

# Runs the commands of a piece, one after the other, within the time that is left. Returns the first exit code that is not 0.
run_piece() {
    piece=$1
    left=$2
    : >"$work/$piece.txt"
    rm -f "$work/$piece.json"
    commands_of "$piece" | sed "s,--json @,--json $work/$piece.json," >"$work/$piece.sh"
    timeout --kill-after=20 "$left" sh -eu "$work/$piece.sh" </dev/null >>"$work/$piece.txt" 2>&1
}

mkdir -p "$work"
case ${1:-} in
--list)
    show
    exit 0
    ;;
--pack)
    shift
    exec "$python" scripts/gpu_pack.py "$@"
    ;;
--dry-run)
    shift
    wanted=${*:-$pieces}
    for piece in $wanted; do
        commands=$(commands_of "$piece")
        echo "# $piece"
        printf '%s\n' "$commands"
    done
    exit 0
    ;;
-*)
    sed -n '2,9p' "$0" >&2
    exit 2
    ;;
esac

for piece in "$@"; do
    commands_of "$piece" >/dev/null
done
if ! nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader >"$work/gpu.txt" 2>&1; then
    echo "error: nvidia-smi finds no GPU here: $(head -n 1 "$work/gpu.txt")" >&2
    exit 1
fi
cat "$work/gpu.txt"
mkdir -p "$out"
results taken >"$work/taken"
started=$(date +%s)
n_failed=0
n_run=0
wanted=${*:-$pieces}
for piece in $wanted; do
    if [ $# -eq 0 ] && grep -qx "$piece" "$work/taken"; then
        continue
    fi
    elapsed=$(($(date +%s) - started))
    if [ "$n_run" -gt 0 ] && [ $((elapsed + $(seconds_of "$piece"))) -gt "$budget" ]; then
        echo "next: $piece"
        exit "$((n_failed > 0))"
    fi
    n_run=$((n_run + 1))
    echo "== $piece: $(about "$piece")"
    code=0
    began=$(date +%s)
    case $piece in build | peer) [ "$is_built${arguments:-}" ] || set_cmake_args ;; esac
    run_piece "$piece" "$((budget - elapsed))" || code=$?
    took=$(($(date +%s) - began))
    results record "$piece" --code "$code" --seconds "$took" --peer "$peer_kind"
    echo "$piece: exit code $code after $took s"
    [ "$piece" != smoke ] || cat "$work/smoke.txt"
    if [ "$code" -ne 0 ]; then
        tail -n 20 "$work/$piece.txt" >&2
        n_failed=$((n_failed + 1))
        case $piece in build | smoke | peer | models) exit 1 ;; esac
    fi
done
echo "no piece is left; the tables are in $out/gpu-tables.md"
exit "$((n_failed > 0))"
