#!/bin/sh
# Compiles cext/spec, and the parts of llama.cpp that handle untrusted input, with instrumentation.
#
#   scripts/instrument.sh address    -> build/address/{abi_test,step_bench,attention_test,rows_test,_spec…so}   (GCC, ASan and UBSan)
#   scripts/instrument.sh thread     -> build/thread/{handover_test,sampling_test}     (clang, TSan)
#   scripts/instrument.sh fuzz       -> build/fuzz/{plan_fuzz,grammar_fuzz,…}          (clang, libFuzzer, ASan, UBSan)
#   scripts/instrument.sh texts      -> build/texts/{split_test,tokenizer_counts}      (GCC, tokenisers that count)
#
# The rest of llama.cpp, ggml's kernels above all, is linked as `make dev` built it (DRAFTHOUSE_BUILD names another
# build folder): an object with instrumentation is linked before the archive and so takes the place of the plain one.
set -eu
kind=$1
cd "$(dirname "$0")/.."
# Relative: lists of paths below are split at blanks, which a checkout's own path may have.
build=${DRAFTHOUSE_BUILD:-$(find build -maxdepth 1 -type d -name 'cp*' | head -n 1)}
python=${DRAFTHOUSE_PYTHON:-.venv/bin/python}
if [ -z "$build" ] || [ ! -d "$build/llama.cpp" ]; then
    echo 'the engine is not built; run make dev first' >&2
    exit 2
fi
llama=$("$python" cext/fetch_llama_cpp.py)
number=$(sed -n 's/^version = "\(b[0-9]*\)"$/\1/p' cext/llama_cpp.lock)
out=build/$kind
mkdir -p "$out/obj"
if [ "$(cat "$out/source" 2>/dev/null)" != "$llama" ]; then
    rm -f "$out"/obj/*.o # of another llama.cpp, or of other patches
    echo "$llama" >"$out/source"
fi
ln -sfn "$llama" "$out/llama.cpp" # where the cache is may have a blank, too
llama=$out/llama.cpp

# Runtime of clang is a package of its own: apt-get install clang-14 libclang-rt-14-dev
clang=$(command -v clang++ || command -v clang++-14 || true)
case $kind in
address)
    cxx=${CXX:-g++}
    flags='-fsanitize=address,undefined -fno-omit-frame-pointer'
    ;;
thread)
    cxx=$clang
    flags='-fsanitize=thread'
    ;;
fuzz)
    cxx=$clang
    flags='-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer'
    ;;
texts)
    cxx=${CXX:-g++}
    flags='-fsanitize-coverage=trace-pc'
    ;;
*)
    echo "unknown kind \"$kind\"; expected address, thread, fuzz or texts" >&2
    exit 2
    ;;
esac
if [ -z "$cxx" ]; then
    echo 'clang is not installed: apt-get install clang-14 libclang-rt-14-dev' >&2
    exit 2
fi

include="-Icext -isystem $llama/common -isystem $llama/include -isystem $llama/ggml/include -isystem $llama
    -isystem $llama/src -isystem $llama/vendor"
parts='common/sampling common/speculative common/ngram-cache common/ngram-map src/llama-grammar'
if [ "$kind" = thread ]; then
    parts="$parts src/llama-context src/llama-sampler" # threads choose tokens from one context
fi
if [ "$kind" = fuzz ]; then
    parts="$parts common/common common/ngram-mod common/reasoning-budget src/llama-batch src/llama-context
        src/llama-kv-cache src/llama-kv-cache-iswa src/llama-memory src/llama-memory-hybrid
        src/llama-memory-recurrent src/llama-sampler src/llama-vocab src/unicode"
fi

# Object of a source, compiled when the source, a header of ours or this script is newer.
compile() { # source name extra flags…
    source=$1
    object=$out/obj/$2.o
    shift 2
    if [ ! -e "$object" ] || [ "$source" -nt "$object" ] || [ scripts/instrument.sh -nt "$object" ] ||
        { [ "${source#"$llama"}" = "$source" ] &&
            { [ cext/spec.h -nt "$object" ] || [ cext/spec/internal.hpp -nt "$object" ] ||
                [ tests/fuzz/harness.h -nt "$object" ]; }; }; then
        # shellcheck disable=SC2086  # lists of flags
        $cxx -std=c++17 -O1 -g -fPIC -DDRAFTHOUSE_LLAMA_CPP_VERSION="\"$number\"" $flags "$@" -c "$source" \
            -o "$object" $include
    fi
}

if [ "$kind" = texts ]; then
    parts='src/llama-vocab src/unicode'
fi

# Every list of expressions of llama-vocab.cpp; and src/unicode.cpp as it was before patch 0010.
if [ "$kind" = fuzz ] || [ "$kind" = texts ]; then
    awk '/regex_exprs = \{$/ { print "{"; inside = 1; next }
        inside && /^ *\};$/ { print "},"; inside = 0 }
        inside { print }' "$llama/src/llama-vocab.cpp" >"$out/splitters.inc"
    rm -rf "$out/unpatched"
    mkdir -p "$out/unpatched/src"
    for file in unicode.cpp unicode.h unicode-regex.h; do
        cp "$llama/src/$file" "$out/unpatched/src"
    done
    # Without its part for llama-vocab.cpp, which a later patch changes again.
    awk '/^--- / { is_wanted = $2 !~ /llama-vocab/ } is_wanted' cext/patches/0010-texts-of-any-length.patch >"$out/0010.patch"
    PYTHONPATH=cext "$python" - "$out/unpatched" "$out/0010.patch" <<'END'
import sys
from pathlib import Path

import patch_files

patch_files.apply(Path(sys.argv[1]), [Path(sys.argv[2])], is_reverse=True)
END
    include="$include -I$out"
fi

for part in $parts; do
    compile "$llama/$part.cpp" "$(basename "$part")" -w -DNDEBUG # as it is released
done
objects=
if [ "$kind" != texts ]; then
    for source in cext/spec/*.cpp; do
        name=spec_$(basename "$source" .cpp)
        compile "$source" "$name"
        objects="$objects $out/obj/$name.o"
    done
fi
if [ "$kind" = thread ]; then
    # ggml's own threads instead of OpenMP's, whose hand-overs a sanitizer does not see.
    if [ ! -e "$out/obj/ggml-cpu.o" ] || [ scripts/instrument.sh -nt "$out/obj/ggml-cpu.o" ]; then
        # shellcheck disable=SC2086
        ${clang%%++*}${clang##*++} -std=gnu11 -O2 -g -fPIC -w -DNDEBUG -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -march=native \
            -DGGML_SCHED_MAX_COPIES=4 -DGGML_USE_CPU_REPACK -DGGML_USE_LLAMAFILE $flags -I"$llama/ggml/src" \
            -I"$llama/ggml/src/ggml-cpu" -I"$llama/ggml/include" -c "$llama/ggml/src/ggml-cpu/ggml-cpu.c" \
            -o "$out/obj/ggml-cpu.o"
    fi
    objects="$objects $out/obj/ggml-cpu.o"
fi
for part in $parts; do
    objects="$objects $out/obj/$(basename "$part").o"
done
archives=
for name in llama-common llama-common-base llama cpp-httplib ggml ggml-rpc ggml-cpu ggml-base; do
    archives="$archives $(find "$build/llama.cpp" -name "lib$name.a")"
done

link() { # program flags… objects…
    program=$1
    shift
    # shellcheck disable=SC2086
    $cxx "$@" $objects -Wl,--start-group $archives -Wl,--end-group -l:libgomp.so.1 -lpthread -ldl -o "$out/$program"
}

case $kind in
address)
    include_python=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    for program in abi_test step_bench; do
        # shellcheck disable=SC2086
        gcc -std=c11 -D_POSIX_C_SOURCE=200809L -g $flags -Icext -c cext/$program.c -o "$out/obj/$program.o"
        # shellcheck disable=SC2086
        link $program $flags "$out/obj/$program.o"
    done
    # The files of ggml's kernels that our patches change.
    kernels=
    for part in ops repack tiled/tiled tiled/tiled-kernel; do
        compile "$llama/ggml/src/ggml-cpu/$part.cpp" "$(basename "$part")" -w -DNDEBUG -D_GNU_SOURCE -march=native \
            "-I$llama/ggml/src" "-I$llama/ggml/src/ggml-cpu" "-I$llama/ggml/include"
        kernels="$kernels $out/obj/$(basename "$part").o"
    done
    for program in attention_test rows_test; do
        compile tests/kernels/$program.cpp $program
        # shellcheck disable=SC2086
        $cxx $flags "$out/obj/$program.o" $kernels -Wl,--start-group $archives -Wl,--end-group \
            -l:libgomp.so.1 -lpthread -ldl -o "$out/$program"
    done
    folder=$out/python/drafthouse_engine
    mkdir -p "$folder"
    cp cext/drafthouse_engine/*.py "$folder/"
    "$(dirname "$python")/cython" -3 --module-name drafthouse_engine._spec -I cext cext/drafthouse_engine/_spec.pyx \
        -o "$out/obj/_spec.c"
    gcc -O1 -g -fPIC -w "-I$include_python" -Icext -c "$out/obj/_spec.c" -o "$out/obj/_spec.o"
    suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    # shellcheck disable=SC2086
    link "python/drafthouse_engine/_spec$suffix" $flags -shared "$out/obj/_spec.o"
    ;;
thread)
    for program in handover_test sampling_test; do
        compile tests/fuzz/$program.cpp $program -Itests/fuzz
        # shellcheck disable=SC2086
        link $program $flags "$out/obj/$program.o"
    done
    ;;
fuzz)
    "$python" - "$out/models" <<'END'
import sys
from pathlib import Path

from tests.support.block_draft import block_draft

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
block_draft(folder / "dflash.gguf")
block_draft(folder / "dspark.gguf", markov_rank=32, has_confidence=True)
END
    cp "$llama"/models/ggml-vocab-*.gguf "$out/models/"
    compile tests/fuzz/unpatched_split.cpp unpatched_split -w -DNDEBUG
    for source in tests/fuzz/*_fuzz.cpp; do
        name=$(basename "$source" .cpp)
        if [ "$name" = snapshot_fuzz ] && ! grep -q spec_engine_seq_load cext/spec.h; then
            continue # this engine has no snapshots
        fi
        compile "$source" "$name" -Itests/fuzz
        more=
        if [ "$name" = tokenizer_fuzz ]; then
            more=$out/obj/unpatched_split.o
        fi
        if [ "$name" = plan_fuzz ]; then
            for part in tests/fuzz/plan/*.cpp; do
                compile "$part" "plan_$(basename "$part" .cpp)" -Itests/fuzz
                more="$more $out/obj/plan_$(basename "$part" .cpp).o"
            done
        fi
        # shellcheck disable=SC2086
        link "$name" -fsanitize=fuzzer,address,undefined "$out/obj/$name.o" $more
    done
    ;;
texts)
    flags= # what follows is not counted
    for program in unpatched_split split_test tokenizer_counts; do
        compile tests/fuzz/$program.cpp $program -w -DNDEBUG -Itests/fuzz
    done
    link split_test "$out/obj/split_test.o" "$out/obj/unpatched_split.o"
    wrap=
    for function in memcpy memmove memset memcmp memchr _ZSt11_Hash_bytesPKvmm; do
        wrap="$wrap -Wl,--wrap=$function"
    done
    # shellcheck disable=SC2086
    link tokenizer_counts "$out/obj/tokenizer_counts.o" -static-libstdc++ $wrap
    ;;
esac
echo "built $out"
