#!/usr/bin/env bash
# Make the virtual environments of the peers that benchmarks/feed.py measures, one for each.
#
#   bash benchmarks/feed_peers.sh [DIR [NAME...]]
#
#   DIR      where they go; as `--peers` of feed.py. Default: gpufeed-peers in the user's cache folder
#   NAME     only these
#   PYTHON   the interpreter that makes them (python3)
#   TORCH    the torch release that each gets (torch==2.13.0)
#
# A peer that cannot be installed leaves DIR/NAME.skipped with the reason, and the others go on. What is there already
# is left alone; remove DIR/NAME to make it anew. Needs the network.
set -uo pipefail

DIR=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/gpufeed-peers}
shift || true
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
NAMES=(webdataset spdl tensorstore litdata streaming ffcv)
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)

# The requirements of an installed package, without torchvision: its usual build fits only a torch with CUDA, and
# where torch has none, importing it fails. No peer needs it to read arrays.
requirements() {
    "$1/bin/python" - "$2" <<'PY'
import importlib.metadata, re, sys
for line in importlib.metadata.requires(sys.argv[1]) or []:
    name = re.match(r"[A-Za-z0-9_.-]+", line)[0].lower()
    if "extra ==" not in line and name not in ("torch", "torchvision"):
        print(line)
PY
}

# install ENV PACKAGE==VERSION: the package, then what it asks for.
install() {
    local env=$1 package=$2
    "$env/bin/pip" install --no-deps "$package" && requirements "$env" "${package%%==*}" >"$env/requirements.txt" &&
        "$env/bin/pip" install -r "$env/requirements.txt"
}

# What FFCV compiles against. Where the system lacks it, Debian's packages are unpacked beside the environment: nothing
# is installed. FFCV asks for all of OpenCV and uses two modules of it.
ffcv_headers() {
    local root=$1 missing
    missing=$(apt-get install --simulate --no-install-recommends -o Debug::NoLocking=1 \
        libopencv-core-dev libopencv-imgproc-dev libturbojpeg0-dev 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p')
    [ -n "$missing" ] || { echo "FFCV needs the headers of OpenCV and TurboJPEG: libopencv-dev, libturbojpeg0-dev"; return 1; }
    mkdir -p "$root/packages" "$root/pkgconfig" && cd "$root/packages" || return
    # shellcheck disable=SC2086
    apt-get download $missing || { echo "FFCV needs the headers of OpenCV and TurboJPEG, and apt-get brings none"; return 1; }
    for package in *.deb; do dpkg -x "$package" "$root" || return; done
    local libraries
    libraries=$(dirname "$(find "$root/usr/lib" -name libturbojpeg.so | head -n 1)")
    # Links to libraries that the system has, not the packages.
    for link in "$libraries"/*.so; do
        [ -e "$link" ] || ln -sf "/${libraries#"$root"/}/$(readlink "$link")" "$link"
    done
    printf '#define HAVE_OPENCV_CORE\n#define HAVE_OPENCV_IMGPROC\n' >"$root/usr/include/opencv4/opencv2/opencv_modules.hpp"
    printf 'Name: opencv4\nDescription: core, imgproc\nVersion: 4\nLibs: -L%s -lopencv_core -lopencv_imgproc\nCflags: -I%s\n' \
        "$libraries" "$root/usr/include/opencv4" >"$root/pkgconfig/opencv4.pc"
    printf 'Name: libturbojpeg\nDescription: turbojpeg\nVersion: 2\nLibs: -L%s -lturbojpeg\nCflags: -I%s -I%s\n' \
        "$libraries" "$root/usr/include" "$root/usr/include/$(basename "$libraries")" >"$root/pkgconfig/libturbojpeg.pc"
    echo "$libraries" >"$root/libraries"
}

install_ffcv() {
    local env=$1 root=$1/system
    "$env/bin/pip" install "setuptools<81" wheel numba opencv-python-headless terminaltables pytorch-pfn-extras fastargs \
        assertpy tqdm psutil pillow || return
    if pkg-config --exists opencv4 libturbojpeg; then
        "$env/bin/pip" install --no-cache-dir --no-build-isolation --no-deps ffcv==1.0.2
        return
    fi
    (ffcv_headers "$root") || return
    local lib
    lib=$(cat "$root/libraries")
    # Not from pip's cache: what was built for another folder looks for its libraries there.
    PKG_CONFIG_PATH=$root/pkgconfig PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 \
        LDFLAGS="-Wl,--disable-new-dtags,-rpath,$lib:$lib/blas:$lib/lapack" \
        "$env/bin/pip" install --no-cache-dir --no-build-isolation --no-deps ffcv==1.0.2
}

# It imports torchvision, of the release that goes with torch's; streaming_peer.py makes up for a torch without CUDA.
install_streaming() {
    local env=$1 torchvision
    torchvision=$("$env/bin/python" -c 'import torch; print(f"torchvision==0.{int(torch.__version__.split(chr(46))[1]) + 15}.*")')
    install "$env" mosaicml-streaming==0.13.0 && "$env/bin/pip" install --no-deps "$torchvision" &&
        "$env/bin/pip" install pillow
}

make_peer() {
    local name=$1 env=$DIR/$1
    "$PYTHON" -m venv --clear "$env" && "$env/bin/pip" install "$TORCH" numpy || return
    case $name in
        webdataset) install "$env" webdataset==1.0.2 && echo "import webdataset" >"$env/try.py" ;;
        spdl) install "$env" spdl==0.8.0 && "$env/bin/pip" install h5py==3.16.0 && echo "import spdl.pipeline" >"$env/try.py" ;;
        tensorstore) install "$env" tensorstore==0.1.86 && echo "import tensorstore" >"$env/try.py" ;;
        litdata) install "$env" litdata==0.2.76 && echo "import litdata" >"$env/try.py" ;;
        streaming) install_streaming "$env" && echo "import importlib.util as u; assert u.find_spec('streaming')" >"$env/try.py" ;;
        ffcv) install_ffcv "$env" && echo "import ffcv" >"$env/try.py" ;;
        *) echo "there is no peer $name; known: ${NAMES[*]}"; return 1 ;;
    esac || return
    "$env/bin/python" "$env/try.py" && touch "$env/.ready"
}

for name in "${@:-${NAMES[@]}}"; do
    [ -e "$DIR/$name/.ready" ] && { echo "$name: ready"; continue; }
    if make_peer "$name" >"$DIR/$name.log" 2>&1; then
        rm -f "$DIR/$name.skipped"
        echo "$name: installed"
    else
        grep -v '^[[:space:]]*$' "$DIR/$name.log" | tail -n 1 | cut -c -200 >"$DIR/$name.skipped"
        echo "$name: skipped: $(cat "$DIR/$name.skipped") (all of it: $DIR/$name.log)"
    fi
done
