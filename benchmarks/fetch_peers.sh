#!/usr/bin/env bash
# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.
#
# Usage: benchmarks/fetch_peers.sh DIR [PART_MIB]
#
# Collects the peers of benchmarks/linear_log_prob.py for a GPU machine without network (x86-64,
# Python 3.12, CUDA 13, with torch and Triton), each in its newest version:
#
#   DIR/peers00, peers01, ...   an archive in parts of at most PART_MIB (default 40), so that each
#                               fits a transfer of its own
#   DIR/install_peers.sh        joins the parts it lies beside, checks and unpacks them:
#                               install_peers.sh TARGET => TARGET/site-packages
#   DIR/versions.txt            what was fetched
#
# Then `python benchmarks/linear_log_prob.py --peers TARGET/site-packages`. The folder is called
# site-packages because quack's compilation cache refuses code that lies elsewhere.
#
# SLIME_SOURCE=<a slime checkout> packs slime's functions, which are on no index, and
# EXTRA_WHEELS="<file> ..." what was compiled for that machine, such as apex's
# fused_weight_gradient_mlp_cuda for `--part wgrad`.
set -euo pipefail
dir=${1:?usage: fetch_peers.sh DIR [PART_MIB]}
part_mib=${2:-40}
# quack and Liger work with this one; a newer one is untried. Its libraries are of one version.
cutlass=${CUTLASS_DSL:-4.7.1}

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site-packages
mkdir -p "$site" "$work/wheels"

# Without their dependencies: torch, its cuda-bindings, Triton, einops and typing-extensions are on
# the GPU machine, and verl as a whole would bring ray.
python3 -m pip download --quiet --no-deps --only-binary :all: \
    --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
    --dest "$work/wheels" \
    liger-kernel cut-cross-entropy verl quack-kernels \
    "nvidia-cutlass-dsl==$cutlass" "nvidia-cutlass-dsl-libs-base==$cutlass" \
    "nvidia-cutlass-dsl-libs-core==$cutlass" "nvidia-cutlass-dsl-libs-cu13==$cutlass" \
    apache-tvm-ffi torch-c-dlpack-ext

# The wheels of nvidia-cutlass-dsl share a package, which `pip --target` does not merge.
for wheel in "$work"/wheels/*.whl; do
    case $wheel in
        */verl-*) mkdir "$work/verl" && python3 -m zipfile -e "$wheel" "$work/verl" ;;
        *) python3 -m zipfile -e "$wheel" "$site" ;;
    esac
    basename "$wheel"
done >"$dir/versions.txt"

# Of verl the kernel alone. Its verl.utils.device is a layer over several vendors' devices that
# imports much of the rest; the kernel asks it for these four.
mkdir -p "$site/verl/utils"
cp -r "$work/verl/verl/utils/kernel" "$site/verl/utils/kernel"
cp -r "$work"/verl/verl-*.dist-info "$site/"
touch "$site/verl/__init__.py" "$site/verl/utils/__init__.py"
cat >"$site/verl/utils/device.py" <<'PYTHON'
"""Stands in for verl's own: what verl.utils.kernel needs of it, on CUDA."""

import torch

is_cuda_available = torch.cuda.is_available()


def get_device_name():
    return "cuda"


def get_torch_device():
    return torch.cuda


def get_device_capability(device_id=0):
    return torch.cuda.get_device_capability(device_id)
PYTHON

if [ -n "${SLIME_SOURCE:-}" ]; then
    mkdir -p "$site/slime/utils"
    cp "$SLIME_SOURCE/slime/utils/ppo_utils.py" "$site/slime/utils/"
    cp "$SLIME_SOURCE/LICENSE" "$site/slime/"
    commit=$(git -C "$SLIME_SOURCE" rev-parse --short=9 HEAD 2>/dev/null ||
        basename "$SLIME_SOURCE" | sed 's/^slime-//')
    echo "$commit" >"$site/slime/COMMIT"
    echo "slime/utils/ppo_utils.py of $commit" >>"$dir/versions.txt"
fi
for wheel in ${EXTRA_WHEELS:-}; do
    python3 -m zipfile -e "$wheel" "$site"
    basename "$wheel" >>"$dir/versions.txt"
done

# Neither compiled for Arm nor linked at build time.
find "$site" -name '*aarch64*' -prune -exec rm -rf {} +
find "$site" \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' \) -delete

rm -f "$dir"/peers[0-9][0-9]
tar -C "$work" -cf "$work/peers.tar" site-packages
# Most of it is two compiled libraries of nvidia-cutlass-dsl.
xz --x86 --lzma2=preset=9 --stdout "$work/peers.tar" >"$work/peers.tar.xz"
split -b "${part_mib}m" -d "$work/peers.tar.xz" "$dir/peers"
sum=$(sha256sum <"$work/peers.tar.xz" | cut -d' ' -f1)

cat >"$dir/install_peers.sh" <<SHELL
#!/usr/bin/env bash
# Usage: install_peers.sh TARGET - unpacks the peers into TARGET/site-packages.
set -euo pipefail
target=\${1:?usage: install_peers.sh TARGET}
here=\$(cd "\$(dirname "\$0")" && pwd)
mkdir -p "\$target"
cat "\$here"/peers[0-9][0-9] >"\$target/peers.tar.xz"
echo "$sum  \$target/peers.tar.xz" | sha256sum --check --quiet
python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \\
    "\$target/peers.tar.xz" "\$target"
rm "\$target/peers.tar.xz"
echo "\$target/site-packages"
SHELL
chmod +x "$dir/install_peers.sh"
ls -l "$dir"
