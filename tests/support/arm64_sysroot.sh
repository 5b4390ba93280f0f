#!/usr/bin/env bash
# Unpacks Debian's arm64 libraries that the native core needs into a folder: arm64_sysroot.sh FOLDER. The packages of the
# system stay as they are. RocksDB is left out, because Snappy's CMake files, which its own ask for, name paths in /usr.
set -euo pipefail
folder=$1
apt=$folder.apt
rm -rf "$folder" "$apt"
mkdir -p "$folder" "$apt/lists/partial" "$apt/archives/partial"
touch "$apt/status"
arm64() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "Dir::State=$apt" \
    -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt" -o APT::Sandbox::User="$(id -un)" "$@"
}
arm64 update
arm64 install -y --no-install-recommends --download-only libstdc++6 libasio-dev libxxhash-dev doctest-dev libssl-dev >/dev/null
for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$folder"; done
rm -rf "$apt"
touch "$folder/.stamp"
