#!/bin/sh
# NVIDIA's perf_analyzer from its PyPI wheel, also where the system's C library is older than the wheel wants.
#
#     scripts/perf_analyzer.sh -m angelspec -i grpc -u 127.0.0.1:8001 --async --streaming …
#
# The wheel needs glibc 2.38.  On an older Debian or Ubuntu the first call fetches the libraries of a newer
# release of the same distribution with apt, unpacks them in a folder, and starts the program with their
# loader; nothing is installed and root is not needed.  The folder's bin/perf_analyzer then does the same
# without checks; put bin on the PATH for programs that call perf_analyzer themselves, such as genai-perf.
#
#     PERF_ANALYZER_DIR   the folder; default run/perf_analyzer
#     PYTHON              with pip; default python3
#     SUITE, MIRROR       release and its archive; default trixie or noble, and the mirror apt uses here
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${PERF_ANALYZER_DIR:-$root/run/perf_analyzer}
python=${PYTHON:-python3}
needed=2.38

fail() { echo "perf_analyzer.sh: $1" >&2; exit 1; }

fetch_wheel() {
    "$python" -m pip download -q --no-deps -d "$folder/wheel" --only-binary=:all: \
        --implementation cp --python-version 3.11 --platform manylinux_2_38_x86_64 'perf-analyzer>=2' >&2 ||
        fail "pip cannot download perf-analyzer"
    "$python" -m zipfile -e "$folder"/wheel/perf_analyzer-*.whl "$folder/wheel"
    chmod +x "$folder/wheel/perf_analyzer/bin/perf_analyzer"
}

fetch_libraries() {  # of a newer release, into $folder/lib
    [ -r /etc/os-release ] && . /etc/os-release
    case ${ID:-} in
        debian) suite=${SUITE:-trixie} keys=/usr/share/keyrings/debian-archive-keyring.gpg ;;
        ubuntu) suite=${SUITE:-noble} keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg ;;
        *) fail "needs glibc $needed, this system has $(getconf GNU_LIBC_VERSION); only Debian and Ubuntu are known here" ;;
    esac
    mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | grep "/$ID/\$" | head -1)}
    [ -n "$mirror" ] || fail "apt knows no mirror of $ID; set MIRROR"
    apt=$folder/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages" "$apt/unpacked"
    echo "deb [signed-by=$keys] $mirror $suite main" >"$apt/sources.list"
    : >"$apt/status"
    get() {  # apt-get with lists and state of its own
        apt-get -q -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
            -o APT::Sandbox::User= "$@" >&2 || fail "apt-get $1 failed"
    }
    get update
    (cd "$apt/packages" && get download libc6 libgcc-s1 libstdc++6 libssl3t64 zlib1g)
    for package in "$apt"/packages/*.deb; do dpkg -x "$package" "$apt/unpacked"; done
    mkdir -p "$folder/lib"
    cp -a "$apt"/unpacked/usr/lib/x86_64-linux-gnu/*.so* "$folder/lib"
    rm -r "$apt"
}

install() {
    rm -rf "$folder/wheel" "$folder/lib"
    mkdir -p "$folder/bin"
    fetch_wheel
    loader=
    have=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    if [ "$(printf '%s\n' "$needed" "$have" | sort -V | head -1)" != "$needed" ]; then
        fetch_libraries
        loader="'$folder/lib/ld-linux-x86-64.so.2' --library-path '$folder/lib' "
    fi
    printf '#!/bin/sh\nexec %s"%s" "$@"\n' "$loader" "$folder/wheel/perf_analyzer/bin/perf_analyzer" >"$folder/bin/new"
    chmod +x "$folder/bin/new"
    mv "$folder/bin/new" "$folder/bin/perf_analyzer"  # last, so that it exists only when all the rest does
}

[ "$(uname -m)" = x86_64 ] || fail "the wheel is for x86_64, this is $(uname -m)"
[ -x "$folder/bin/perf_analyzer" ] || install
exec "$folder/bin/perf_analyzer" "$@"
